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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import BinaryIO

import numpy as np

from runtime import machine
from runtime.errors import ArtifactError, ResourceError, shown
from runtime.manifest import Fields, parse_json
from runtime.memory.mapping import anonymous

MAX_HEADER = 16 << 20
ALIGNMENT = 64
PIECE_BYTES = 4 << 20
COPY_SHARE = 0.4  # of free memory that a copy of the weights may take
_AGAIN = "Get an undamaged copy, or compile the model again"
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class Tensor:
    """dtype: as safetensors spells it."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


class Weights:
    """The tensors `order` of one file. `addresses[i]` is 64-byte aligned and valid until close().

    read: what the compiled code reads, by its plan.json; None: the plan does not say.
    """

    def __init__(self, path: Path, order: Sequence[str], read: Sequence[Tensor] | None = None) -> None:
        if read is not None:
            _check_order(order, read)
        with open(path, "rb") as file:
            found = _ordered(file, str(path), order)
            for (_, stored), wanted in zip(found, read or (), strict=False):
                _check_tensor(stored, wanted, str(path))
            self._spans = [slice(begin, begin + stored.bytes) for begin, stored in found]
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
        return [stored.bytes for _, stored in _ordered(file, str(path), order)]


def parse_read(plan: Fields) -> tuple[Tensor, ...] | None:
    """What plan.json says that the compiled code reads; None where it does not say."""
    if "weights" not in plan.value:
        return None
    return tuple(_tensor(fields, fields.text("name")) for fields in plan.objects("weights", 2**20))


def _check_order(order: Sequence[str], read: Sequence[Tensor]) -> None:
    if len(order) != len(read):
        what = f"weight_order has {len(order)} names; the compiled code reads {len(read)} tensors"
        raise ArtifactError(what, where="manifest.json", todo=_AGAIN)
    for number, (name, tensor) in enumerate(zip(order, read, strict=True)):
        if name != tensor.name:
            what = f"weight_order[{number}] is {shown(name)}; the compiled code reads {shown(tensor.name)}"
            raise ArtifactError(what, where="manifest.json", todo=_AGAIN)


def _check_tensor(stored: Tensor, wanted: Tensor, where: str) -> None:
    if stored != wanted:
        what = f"tensor {shown(stored.name)} is {stored}; the compiled code reads {wanted}"
        raise ArtifactError(what, where=where, todo=_AGAIN)


def _ordered(file: BinaryIO, where: str, order: Sequence[str]) -> list[tuple[int, Tensor]]:
    """Of these tensors where each begins in the file."""
    spans = _tensors(file, where)
    lacks = [name for name in order if name not in spans]
    if lacks:
        found = f"{len(lacks)} tensors are missing, the first is {lacks[0]!r}"
        raise ArtifactError(found, where=where, todo=_AGAIN)
    return [spans[name] for name in order]


def _tensors(file: BinaryIO, where: str) -> dict[str, tuple[int, Tensor]]:
    """By name: where it begins in the file."""
    size = os.fstat(file.fileno()).st_size
    if size < 8:
        raise ArtifactError("too short for a safetensors file", where=where, todo=_AGAIN)
    (length,) = struct.unpack("<Q", file.read(8))
    start = 8 + length
    if length > MAX_HEADER or start > size:
        raise ArtifactError(f"a header of {length} bytes in a file of {size}", where=where, todo=_AGAIN)
    header = Fields(parse_json(file.read(length), where), where)
    names = [name for name in header.value if name != "__metadata__"]
    tensors = {name: _located(header.object(name), name, start, size) for name in names}
    _check_disjoint(tensors, where)
    return tensors


def _located(fields: Fields, name: str, start: int, size: int) -> tuple[int, Tensor]:
    """Where it begins in the file. What the compiled code reads of a tensor depends on its shape, so the
    bytes must be as many as that takes."""
    offsets = fields.array("data_offsets", 2)
    if len(offsets) != 2 or any(type(o) is not int for o in offsets):
        raise fields.bad("data_offsets", "two integers")
    begin, end = offsets
    if not 0 <= begin <= end <= size - start:
        raise fields.bad("data_offsets", f"two increasing offsets up to {size - start}")
    tensor = _tensor(fields, name)
    if end - begin != tensor.bytes:
        raise fields.bad("data_offsets", f"{tensor.bytes} bytes apart, as dtype and shape say")
    return start + begin, tensor


def _tensor(fields: Fields, name: str) -> Tensor:
    dtype, shape = fields.text("dtype"), fields.array("shape", 16)
    if dtype not in ITEM_BYTES:
        raise fields.bad("dtype", f"one of {', '.join(ITEM_BYTES)}")
    if any(type(n) is not int or not 0 <= n < 2**63 for n in shape):
        raise fields.bad("shape", "a list of sizes")
    return Tensor(name, dtype, tuple(shape))


def _check_disjoint(tensors: Mapping[str, tuple[int, Tensor]], where: str) -> None:
    order = sorted((at, at + tensor.bytes, name) for name, (at, tensor) in tensors.items() if tensor.bytes)
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
