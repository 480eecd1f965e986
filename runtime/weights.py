"""Weights: a safetensors file, memory-mapped and handed on as addresses. Tensors are bytes here; only the
compiled code knows their types. The file is untrusted: every offset is checked before an address is made of
it.

A mapped file lies in small pages, through which a decode step streams some 10% slower than through huge ones.
So an engine starts with the mapping and moves to a copy when there is time to make one.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import BinaryIO

import numpy as np

from runtime import machine
from runtime.errors import ArtifactError, ResourceError
from runtime.manifest import Fields, parse_json
from runtime.memory.mapping import anonymous

MAX_HEADER = 16 << 20
ALIGNMENT = 64
PIECE_BYTES = 4 << 20
COPY_SHARE = 0.4  # of free memory that a copy of the weights may take
_AGAIN = "Get an undamaged copy, or compile the model again"
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class Weights:
    """The tensors `order` of one file. `addresses[i]` is 64-byte aligned and valid until close()."""

    def __init__(self, path: Path, order: Sequence[str]) -> None:
        with open(path, "rb") as file:
            self._spans = [slice(*span) for span in _ordered_spans(file, str(path), order)]
            mapped = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, access=mmap.ACCESS_READ)
        self._map: mmap.mmap | None = mapped  # None once a copy is used
        self._file = np.frombuffer(mapped, np.uint8)
        self._place(self._file)

    def deserve_copy(self, taken: int) -> bool:
        """Whether huge pages may be had, and memory is there for a copy in them beside `taken` bytes that the
        system counts as free still."""
        free = machine.free_memory() - taken
        return machine.has_huge_pages() and self._file.size < free * COPY_SHARE

    def copy(self, stop: Event) -> np.ndarray | None:
        """The file in memory of huge pages, for move_to(); None if stopped, or where a limit on the process's
        addresses leaves no room."""
        try:
            room = anonymous(self._file.size, "the weights")
        except ResourceError:
            return None
        for at in range(0, room.size, PIECE_BYTES):
            if stop.is_set():
                return None
            room[at : at + PIECE_BYTES] = self._file[at : at + PIECE_BYTES]
            if self._map is not None and hasattr(
                mmap, "MADV_DONTNEED"
            ):  # it is there twice now: the mapping need not hold it
                self._map.madvise(mmap.MADV_DONTNEED, at, min(PIECE_BYTES, room.size - at))
        return room

    def move_to(self, room: np.ndarray) -> list[np.ndarray]:
        """Use a copy from now on. Returns what keeps the old addresses valid."""
        before = self.tensors
        self._file, self._map = room, None
        self._place(room)
        return before

    def _place(self, data: np.ndarray) -> None:
        self.tensors = [_aligned(data[span]) for span in self._spans]
        self.addresses = [tensor.ctypes.data for tensor in self.tensors]

    def close(self) -> None:
        """Drop the memory. The addresses are invalid from here on."""
        self._file, self._map, self.tensors, self.addresses = np.empty(0, np.uint8), None, [], []


def tensor_bytes(path: Path, order: Sequence[str]) -> list[int]:
    """Of each of these tensors. Only the file's header is read."""
    with open(path, "rb") as file:
        return [end - begin for begin, end in _ordered_spans(file, str(path), order)]


def _ordered_spans(file: BinaryIO, where: str, order: Sequence[str]) -> list[tuple[int, int]]:
    """(begin, end) of these tensors in the file."""
    spans = _spans(file, where)
    lacks = [name for name in order if name not in spans]
    if lacks:
        found = f"{len(lacks)} tensors are missing, the first is {lacks[0]!r}"
        raise ArtifactError(found, where=where, todo=_AGAIN)
    return [spans[name] for name in order]


def _spans(file: BinaryIO, where: str) -> dict[str, tuple[int, int]]:
    """(begin, end) of each tensor in the file."""
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise ArtifactError("too short for a safetensors file", where=where, todo=_AGAIN)
    (length,) = struct.unpack("<Q", file.read(8))
    start = 8 + length
    if length > MAX_HEADER or start > size:
        raise ArtifactError(f"a header of {length} bytes in a file of {size}", where=where, todo=_AGAIN)
    header = Fields(parse_json(file.read(length), where), where)
    names = [name for name in header.value if name != "__metadata__"]
    spans = {name: _span(header.object(name), start, size) for name in names}
    _check_disjoint(spans, where)
    return spans


def _span(fields: Fields, start: int, size: int) -> tuple[int, int]:
    """(begin, end) in the file. What the compiled code reads of a tensor depends on its shape, so the bytes
    must be as many as that takes."""
    offsets = fields.array("data_offsets", 2)
    if len(offsets) != 2 or any(type(o) is not int for o in offsets):
        raise fields.bad("data_offsets", "two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= size - start:
        raise fields.bad("data_offsets", f"two increasing offsets up to {size - start}")
    need = _bytes(fields)
    if end - begin != need:
        raise fields.bad("data_offsets", f"{need} bytes apart, as dtype and shape say")
    return start + begin, start + end


def _bytes(fields: Fields) -> int:
    dtype, shape = fields.text("dtype"), fields.array("shape", 16)
    if dtype not in ITEM_BYTES:
        raise fields.bad("dtype", f"one of {', '.join(ITEM_BYTES)}")
    if any(type(n) is not int or n < 0 for n in shape):
        raise fields.bad("shape", "a list of sizes")
    return math.prod(shape) * ITEM_BYTES[dtype]


def _check_disjoint(spans: dict[str, tuple[int, int]], where: str) -> None:
    order = sorted((begin, end, name) for name, (begin, end) in spans.items() if end > begin)
    for (_, end, name), (begin, _, other) in pairwise(order):
        if begin < end:
            raise ArtifactError(f"tensors {name!r} and {other!r} overlap", where=where, todo=_AGAIN)


def _aligned(tensor: np.ndarray) -> np.ndarray:
    """The tensor itself, or a copy where the file did not place it on a 64-byte boundary."""
    if tensor.ctypes.data % ALIGNMENT == 0:
        return tensor
    room = np.empty(tensor.size + ALIGNMENT, np.uint8)
    at = -room.ctypes.data % ALIGNMENT
    room[at : at + tensor.size] = tensor
    return room[at : at + tensor.size]
