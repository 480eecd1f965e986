"""Whether a shared library is whole (System V ABI, chapters 4 and 5): the dynamic loader maps what an ELF
file says it has, and touching a page that the file does not reach ends the process."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little-endian: those of all targets
HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
PROGRAM = struct.Struct("<IIQQQQQQ")
SECTION = struct.Struct("<IIQQQQIIQQ")
NO_BYTES = (0, 8)  # kinds of sections that have none in the file: SHT_NULL, SHT_NOBITS


def missing_bytes(path: Path) -> int:
    """How many bytes more an ELF file would have if all that its headers tell of were there; 0: it is whole.

    0 of any other file too, which no loader takes. Raises OSError.
    """
    with open(path, "rb") as file:
        head, size = file.read(HEADER.size), os.fstat(file.fileno()).st_size
        if not head.startswith(MAGIC):
            return 0
        if len(head) < HEADER.size:
            return HEADER.size - len(head)
        _, _, _, _, _, programs, sections, _, _, _, num_programs, _, num_sections, _ = HEADER.unpack(head)
        tables = ((PROGRAM, programs, num_programs), (SECTION, sections, num_sections))
        ends = [at + count * entry.size for entry, at, count in tables if count]
        if max(ends, default=0) <= size:
            segments, parts = [_entries(file.fileno(), *table) for table in tables]
            ends += [at + length for _, _, at, _, _, length, *_ in segments]
            ends += [at + length for _, kind, _, _, at, length, *_ in parts if kind not in NO_BYTES]
    return max(0, max(ends, default=0) - size)


def _entries(fd: int, entry: struct.Struct, at: int, count: int) -> Iterator[tuple[int, ...]]:
    return entry.iter_unpack(os.pread(fd, count * entry.size, at))
