"""Programs that build kernels: run in process groups of their own, so that none outlives the build."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ENDS_IN_S = 2.0  # g++ removes its temporary files, and those it started end with it


class Tools:
    """A context; leaving it ends what still runs, and all that it started. folder: for temporary files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._running: set[subprocess.Popen[Any]] = set()
        self._lock = threading.Lock()
        self._is_over = False

    def __enter__(self) -> Tools:
        return self

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._is_over = True
            running = list(self._running)
        for process in running:
            end_group(process)

    def run(self, command: Sequence[str], directory: Path) -> tuple[int, str]:
        """(exit code, what it wrote to stderr). Raises OSError where it cannot be started."""
        process = self.start(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(self.folder), "LC_ALL": "C"}, text=True, cwd=directory,
        )  # fmt: skip
        said = process.communicate()[1]
        with self._lock:
            self._running.discard(process)
        return process.returncode, said

    def start(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """It is ended with the context. Raises OSError, after the context's end too."""
        with self._lock:
            if self._is_over:
                raise InterruptedError("the build was ended")
            process = subprocess.Popen(command, process_group=0, **options)
            self._running.add(process)
        return process


def end_group(process: subprocess.Popen[Any]) -> None:
    """End a process that was started with a group of its own, and the group."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_IN_S)
