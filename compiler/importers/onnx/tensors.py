"""Arrays of an ONNX file: in the file itself, or memory-mapped from files beside it.

What a tensor claims (its shape, its type, the file that it is in) is checked against the bytes that there are
before anything is read, and no file outside of the model's own directory is opened.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from compiler.files import is_file
from compiler.importers.refused import ImportRefused
from compiler.weights import BELONG, Array, WeightError
from ir.types import DType, Tensor
from runtime.errors import shown

AGAIN = "Get the file again, or export the model again"
MAX_AXES = 16

TYPES = {
    1: DType.F32,
    2: DType.U8,
    3: DType.I8,
    6: DType.I32,
    7: DType.I64,
    9: DType.BOOL,
    10: DType.F16,
    11: DType.F64,
    16: DType.BF16,
    17: DType.F8E4M3,
}  # of TensorProto.DataType

COMPUTED = {DType.F16: DType.F32, DType.BF16: DType.F32, DType.F64: DType.F32, DType.I64: DType.I32}


def computed(dtype: DType) -> DType:
    """The type in which the graph computes with what is stored as another: f32, and i32 for positions."""
    return COMPUTED.get(dtype, dtype)


def element_type(number: int, where: str) -> DType:
    """Raises ImportRefused on a type that is not read."""
    if number not in TYPES:
        names = ", ".join(TYPES.values())
        raise ImportRefused(f"element type {number}; {names} are read", where=where, todo=AGAIN)
    return TYPES[number]


@dataclass(frozen=True)
class Stored:
    """One array: its bytes begin at `offset` of a file, are `data`, or stand in the tensor's typed field."""

    type: Tensor
    path: Path | None = None
    offset: int = 0
    data: bytes | None = None
    proto: Any = None

    @property
    def place(self) -> Any:
        """What two tensors that are the same bytes have in common."""
        return None if self.path is None else (self.path, self.offset, self.type)


def stored_tensor(tensor: Any, directory: Path, where: str) -> Stored:
    """A TensorProto, checked. Raises ImportRefused."""
    where = f"{where}, tensor {shown(tensor.name)}"
    shape = _shape(tensor, where)
    kind = Tensor(element_type(tensor.data_type, where), shape)
    num_bytes = prod(shape) * kind.dtype.size_bytes
    if tensor.data_location == 1:  # EXTERNAL
        return _external(tensor, kind, num_bytes, directory, where)
    if tensor.HasField("raw_data"):
        if len(tensor.raw_data) != num_bytes:
            what = f"its shape {list(shape)} of {kind.dtype} takes {num_bytes} bytes, and it has"
            raise ImportRefused(f"{what} {len(tensor.raw_data)}", where=where, todo=AGAIN)
        return Stored(kind, data=tensor.raw_data)
    count = sum(len(getattr(tensor, field)) for field in _FIELDS)
    if count != prod(shape):
        what = f"its shape {list(shape)} takes {prod(shape)} numbers, and it has {count}"
        raise ImportRefused(what, where=where, todo=AGAIN)
    return Stored(kind, proto=tensor)


def stored_tensors(tensors: Iterable[Any], path: Path) -> list[Stored]:
    """All arrays of a graph. path: the model's file."""
    return [stored_tensor(t, path.parent, str(path)) for t in tensors]


_FIELDS = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")


def _shape(tensor: Any, where: str) -> tuple[int, ...]:
    shape = tuple(tensor.dims)
    if len(shape) > MAX_AXES or any(n < 0 for n in shape) or prod(n for n in shape if n) * 8 >= 2**63:
        raise ImportRefused(f"no tensor has the shape {list(shape)[:20]}", where=where, todo=AGAIN)
    return shape


def _external(tensor: Any, kind: Tensor, num_bytes: int, directory: Path, where: str) -> Stored:
    entries = {e.key: e.value for e in tensor.external_data}
    path = confined(entries.get("location", ""), directory, where)
    offset, length = (_count(entries.get(key), where) for key in ("offset", "length"))
    size = path.stat().st_size
    if length is not None and length != num_bytes:
        what = f"it has {length} bytes of data, and its shape takes {num_bytes}"
        raise ImportRefused(what, where=where, todo=AGAIN)
    if (offset or 0) + num_bytes > size:
        what = f"bytes {offset or 0}..{(offset or 0) + num_bytes} of {path.name}, which has {size}"
        raise ImportRefused(what, where=where, todo=AGAIN)
    return Stored(kind, path=path, offset=offset or 0)


def _count(text: str | None, where: str) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ImportRefused(f"its external data is at {shown(text)}", where=where, todo=AGAIN)
    return int(text)


def confined(location: str, directory: Path, where: str) -> Path:
    """The file of external data, which must be below the model's own directory, links followed."""
    pure, todo = PurePosixPath(location), "Put the file beside the model, and name it without a folder"
    outside = not location or pure.is_absolute() or ".." in pure.parts or "\\" in location or "\0" in location
    path = directory / location if not outside else directory
    root = os.path.realpath(directory) + os.sep
    if outside or not os.path.realpath(path).startswith(root):
        what = f"its data is said to be in {shown(location)}, outside of the model's directory"
        raise ImportRefused(what, where=where, todo=todo)
    if not is_file(path):
        raise ImportRefused(f"its data is in {shown(location)}, which is no file", where=where, todo=todo)
    return path


class OnnxSource:
    """The arrays of a file by the graph's names."""

    def __init__(self, stored: Mapping[str, Stored], where: str) -> None:
        self._stored, self._where = dict(stored), where
        self._maps: dict[Path, Array] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._stored)

    def type(self, name: str) -> Tensor:
        return self._find(name).type

    def rows(self, name: str, lo: int, hi: int) -> Array:
        return self.read(name)[lo:hi]

    def read(self, name: str) -> Array:
        return self.array(self._find(name))

    def array(self, found: Stored) -> Array:
        """A read-only view where the file allows it."""
        shape: Any = found.type.shape
        if found.proto is not None:
            from onnx import numpy_helper

            return numpy_helper.to_array(found.proto).astype(found.type.dtype.numpy, copy=False)
        if found.path is None:
            return np.frombuffer(found.data or b"", found.type.dtype.numpy).reshape(shape)
        if found.path not in self._maps:
            self._maps[found.path] = np.memmap(found.path, np.uint8, mode="r")
        num_bytes = prod(shape) * found.type.dtype.size_bytes
        data = self._maps[found.path][found.offset : found.offset + num_bytes]
        if found.offset % found.type.dtype.size_bytes:
            data = np.array(data)
        return data.view(found.type.dtype.numpy).reshape(shape)

    def _find(self, name: str) -> Stored:
        if name not in self._stored:
            raise WeightError(f"there is no tensor {name!r}", where=self._where, todo=BELONG)
        return self._stored[name]
