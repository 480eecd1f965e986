"""Element types, tensor types and the types of KV-cache state."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import ml_dtypes
import numpy as np

from ir.dims import Dim, normalize


class DType(StrEnum):
    """Element types, spelled as in the IR's text."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I64 = "i64"
    I32 = "i32"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"

    @property
    def numpy(self) -> np.dtype[Any]:
        return _NUMPY[self]

    @property
    def size_bytes(self) -> int:
        return self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        return self in (DType.F64, DType.F32, DType.F16, DType.BF16)

    @property
    def is_integer(self) -> bool:
        return self in (DType.I64, DType.I32, DType.I8, DType.U8)


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I8: np.dtype(np.int8),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}


@dataclass(frozen=True)
class Tensor:
    """A dense array; an empty shape is a scalar."""

    dtype: DType
    shape: tuple[Dim, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(normalize(d) for d in self.shape))

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Stream:
    """One array that a KV group keeps per token and layer: [heads, head_size] elements of dtype."""

    name: str
    dtype: DType
    heads: int
    head_size: int

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in one layer."""
        return self.heads * self.head_size * self.dtype.size_bytes


@dataclass(frozen=True)
class KV:
    """State of one KV group: `layers` layers that share block size, streams and lifetime.

    `window` None keeps every token (lifetime "full"); W keeps the last W tokens readable.
    The number of blocks is a run-time number and not part of the type.
    """

    streams: tuple[Stream, ...]
    layers: int
    block: int = 16
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all the group's layers."""
        return self.layers * sum(s.bytes_per_token for s in self.streams)


Type = Tensor | KV
