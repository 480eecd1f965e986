"""Libraries that are cut short, at many lengths, beside whole ones."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from runtime.cpu.elf import missing_bytes

LIBRARIES = sorted(Path(np.__file__).parent.rglob("*.so"))


def test_what_runs_here_is_whole() -> None:
    for path in (*LIBRARIES, Path(sys.executable).resolve()):
        with path.open("rb") as file:
            assert file.read(4) == b"\x7fELF"
        assert missing_bytes(path) == 0, path
    assert len(LIBRARIES) > 5


def test_what_is_cut_short_lacks_something(tmp_path: Path) -> None:
    whole = min((path.read_bytes() for path in LIBRARIES), key=len)
    cut = tmp_path / "cut.so"
    for size in (*range(6, 300), *range(300, len(whole), 97), *range(len(whole) - 70, len(whole))):
        cut.write_bytes(whole[:size])
        assert missing_bytes(cut) > 0, size
    for other in (whole, whole + b"more", whole[:5], b"", b"not a library"):
        cut.write_bytes(other)
        assert missing_bytes(cut) == 0
