"""What every refusal by the command line has: a line, an exit code, advice, and nothing left behind."""

from __future__ import annotations

import io
import json
import os
import resource
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from compiler.cli.main import main

ROOM_BYTES = 400 << 20  # of address space that a refusal may take, whatever a file claims
JSON = ("compile", "generate", "inspect", "bench", "profile")  # commands that take --json


@dataclass
class Commands:
    """Runs the command line in this process, with a temporary folder and caches of its own under `root`."""

    root: Path
    patch: pytest.MonkeyPatch
    captured: pytest.CaptureFixture[str]

    def __post_init__(self) -> None:
        for name in ("tmp", "cache", "home"):
            (self.root / name).mkdir(exist_ok=True)
        self.patch.setattr(tempfile, "tempdir", str(self.root / "tmp"))
        for name, folder in (("TMPDIR", "tmp"), ("OCTAVO_CACHE", "cache"), ("HOME", "home")):
            self.patch.setenv(name, str(self.root / folder))
        self.patch.setenv("DEBUG", "0")

    def run(self, *args: object, stdin: str = "") -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        self.patch.setattr(sys, "stdin", io.StringIO(stdin))
        self.captured.readouterr()
        with pytest.raises(SystemExit) as end:
            main([str(arg) for arg in args])
        out, err = self.captured.readouterr()
        return int(end.value.code or 0), out, err

    def refuses(self, *args: object, stdin: str = "", says: str = "", where: str = "") -> dict[str, str]:
        """The error's parts, once its shape is as it should be.

        says: what its line has; where: what its place has.
        """
        before = self.files()
        given = [*args, "--json"] if args[0] in JSON else args
        code, out, err = self.run(*given, stdin=stdin)
        assert code == 2, (args, err)
        assert "Traceback" not in err
        assert not (left := self.files().items() ^ before.items()), left
        lines = err.strip("\n").split("\n")
        ours = [line for line in lines if line.startswith("octavo: ")]
        assert len(ours) == 1 and lines[-1].startswith(("octavo: ", "  ")), err
        assert len(lines) == 1 or args[0] in ("compile", "opt"), err  # which say before what they will do
        assert ours[0].endswith(".") and says in ours[0] and where in ours[0].partition(": ")[2], err
        parts: dict[str, Any] = json.loads(out)["error"] if args[0] in JSON else {}
        assert all(parts.values()), parts
        assert not parts or ours[0] == f"octavo: {parts['where']}: {parts['what']}. {parts['todo']}."
        assert where in parts.get("where", where), parts
        return parts

    def files(self) -> dict[str, tuple[int, bool]]:
        """Everything there is, with sizes: what appears, grows or goes is a trace. (Not so the empty folder
        that torch keeps in the temporary one.)"""
        found = {}
        for folder, names, files in os.walk(self.root):
            for name in (n for n in (*names, *files) if not n.startswith("torchinductor_")):
                path = os.path.join(folder, name)
                found[path] = (0 if name in names else os.lstat(path).st_size, os.path.islink(path))
        return found


@contextmanager
def little_memory() -> Iterator[None]:
    """Within it what a file claims cannot be allocated unseen: more than ROOM_BYTES is a MemoryError."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
