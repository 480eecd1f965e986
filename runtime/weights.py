"""Weights: a safetensors file, memory-mapped and handed on as addresses. Tensors are bytes here; only the
compiled code knows their types. The file is untrusted: every offset is checked before an address is made of
it.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from runtime.errors import ArtifactError
from runtime.manifest import Fields, parse_json

MAX_HEADER = 100 << 20
ALIGNMENT = 64
_AGAIN = "Get an undamaged copy, or compile the model again"
ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1}


class Weights:
    """The tensors `order` of one file. `addresses[i]` is 64-byte aligned and valid until close()."""

    def __init__(self, path: Path, order: Sequence[str]) -> None:
        with open(path, "rb") as file:
            size = path.stat().st_size
            if size < 8:
                raise ArtifactError("too short for a safetensors file", where=str(path), todo=_AGAIN)
            data = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
        spans = _spans(data, str(path))
        lacks = [name for name in order if name not in spans]
        if lacks:
            found = f"{len(lacks)} tensors are missing, the first is {lacks[0]!r}"
            raise ArtifactError(found, where=str(path), todo=_AGAIN)
        self.tensors = [_aligned(data[slice(*spans[name])]) for name in order]
        self.addresses = [tensor.ctypes.data for tensor in self.tensors]

    def close(self) -> None:
        """Drop the mapping. The addresses are invalid from here on."""
        self.tensors, self.addresses = [], []


def _spans(data: np.ndarray, where: str) -> dict[str, tuple[int, int]]:
    """(begin, end) of each tensor in the file."""
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    start = 8 + length
    if length > MAX_HEADER or start > data.size:
        raise ArtifactError(f"a header of {length} bytes in a file of {data.size}", where=where, todo=_AGAIN)
    header = Fields(parse_json(data[8:start].tobytes(), where), where)
    names = [name for name in header.value if name != "__metadata__"]
    spans = {name: _span(header.object(name), start, data.size) for name in names}
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
