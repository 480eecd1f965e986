"""Processes that compile kernels, started as they are needed and reused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

from codegen.errors import REPORT
from codegen.tools import Tools
from codegen.triton.devices import Device
from codegen.triton.toolchain import BuildError, environment

WORKER = Path(__file__).parent / "worker.py"
CLEARED = ("TRITON_", "LLVM_", "MLIR_", "PTXAS_", "DISABLE_PTXAS", "NVPTX_", "AMDGCN_")
MOST_LINES = 12  # of an error


class Workers:
    """As many processes as there are callers at once, which end with `tools`."""

    def __init__(self, source: Path, device: Device, tools: Tools) -> None:
        self._source, self._device, self._tools = source, device, tools
        self._idle: list[_Worker] = []

    def build(self, job: dict[str, Any]) -> dict[str, Any]:
        """What `worker` answers. Raises BuildError naming the kernel."""
        worker = self._take()
        answer = worker.ask(job)
        self._idle.append(worker)
        if "error" in answer:
            raise BuildError(
                f"Triton cannot build kernel {job['name']} for {self._device.target}",
                todo=REPORT,
                said=_shortened(answer["error"]),
            )
        return answer

    def _take(self) -> _Worker:
        try:
            return self._idle.pop()
        except IndexError:
            return _Worker(self._source, self._device, self._tools)


class _Worker:
    def __init__(self, source: Path, device: Device, tools: Tools) -> None:
        self._log: IO[bytes] = tempfile.TemporaryFile(dir=tools.folder)
        args = [str(source), device.backend, device.arch, str(device.warp_size)]
        self._process = tools.start(
            [sys.executable, "-P", str(WORKER), *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=_environment(device, tools.folder),
        )  # fmt: skip

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """The answer; an error with the last lines that the process printed if it ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except OSError:
            answer = ""
        return json.loads(answer) if answer else {"error": self._last_words()}

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        printed = self._log.read().decode(errors="replace").splitlines()[-MOST_LINES:]
        return "\n".join([f"the compiler ended with code {code}", *printed])


def _environment(device: Device, folder: Path) -> dict[str, str]:
    """Ours without what sets Triton, and with what its binaries are made under."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(CLEARED)}
    return kept | {"TMPDIR": str(folder)} | environment(device.backend, device.arch, folder)


def _shortened(text: str) -> str:
    """Triton shows the function up to the line in question and then says what is wrong."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("Repro command")]
    return "\n".join(lines if len(lines) <= MOST_LINES else [lines[0], "...", *lines[2 - MOST_LINES :]])
