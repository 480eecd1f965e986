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
    F8E4M3 = "f8e4m3"
    I64 = "i64"
    I32 = "i32"
    I8 = "i8"
    U2 = "u2"
    U4 = "u4"
    U8 = "u8"
    BOOL = "bool"

    @property
    def numpy(self) -> np.dtype[Any]:
        return _NUMPY[self]

    @property
    def bits(self) -> int:
        """Of an element where it is packed."""
        return _PACKED_BITS.get(self, self.numpy.itemsize * 8)

    @property
    def size_bytes(self) -> int:
        """Raises ValueError for a type whose elements share bytes."""
        if self in _PACKED_BITS:
            raise ValueError(f"elements of {self} share bytes")
        return self.numpy.itemsize

    @property
    def is_float(self) -> bool:
        """Whether values are computed in it: not f8e4m3, which is a type of codes, as integers are."""
        return self in (DType.F64, DType.F32, DType.F16, DType.BF16)

    @property
    def is_integer(self) -> bool:
        return self in (DType.I64, DType.I32, DType.I8, DType.U2, DType.U4, DType.U8)

    @property
    def is_code(self) -> bool:
        """Whether it can hold the codes of quantised values."""
        return self in (DType.I8, DType.U2, DType.U4, DType.U8, DType.F8E4M3)


_NUMPY: dict[DType, np.dtype[Any]] = {
    DType.F64: np.dtype(np.float64),
    DType.F32: np.dtype(np.float32),
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(ml_dtypes.bfloat16),
    DType.F8E4M3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.I64: np.dtype(np.int64),
    DType.I32: np.dtype(np.int32),
    DType.I8: np.dtype(np.int8),
    DType.U2: np.dtype(np.uint8),  # a code in each byte; they are packed in files and kernels only
    DType.U4: np.dtype(np.uint8),
    DType.U8: np.dtype(np.uint8),
    DType.BOOL: np.dtype(np.bool_),
}
_PACKED_BITS = {DType.U2: 2, DType.U4: 4}


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


TOKEN, CHANNEL = "token", "channel"  # what shares a scale


@dataclass(frozen=True)
class Stream:
    """One array that a KV group keeps per token and layer: [heads, head_size] elements of dtype.

    Codes have scales, of f16: one for each token and head (`per` token), or one for each head and channel of
    a block (`per` channel). Codes of u4 and u2 have a minimum beside each: x = code * scale + minimum.
    per_block: it is kept once for each block, not for each token.
    """

    name: str
    dtype: DType
    heads: int
    head_size: int
    per: str = TOKEN
    per_block: bool = False

    @property
    def is_quantized(self) -> bool:
        return self.dtype.is_code

    @property
    def has_minimum(self) -> bool:
        return self.dtype in (DType.U4, DType.U2)

    @property
    def parts(self) -> tuple[str, ...]:
        """Names of its arrays in a state: the elements, then scales and minima."""
        if not self.is_quantized:
            return (self.name,)
        scales = ("scale", "min") if self.has_minimum else ("scale",)
        return (self.name, *(f"{self.name}.{part}" for part in scales))

    def part_shape(self, part: str, block: int) -> tuple[int, ...]:
        """Of one of its arrays, in one block of one layer."""
        if part == self.name:
            return (*(() if self.per_block else (block,)), self.heads, self.head_size)
        return (self.heads, self.head_size) if self.per == CHANNEL else (block, self.heads)

    def part_dtype(self, part: str) -> DType:
        return self.dtype if part == self.name else DType.F16

    def bytes_per_block(self, block: int) -> int:
        """Bytes of one block in one layer, scales included; head sizes of packed codes are padded to 16."""
        size = -(-self.head_size // 16) * 16 if self.dtype.bits < 8 else self.head_size
        codes = (1 if self.per_block else block) * self.heads * size * self.dtype.bits // 8
        scales = self.head_size if self.per == CHANNEL else block
        return codes + (len(self.parts) - 1) * self.heads * scales * DType.F16.size_bytes


@dataclass(frozen=True)
class KV:
    """State of one KV group: `layers` layers that share block size, streams and lifetime.

    `window` None keeps every token (lifetime "full"); W keeps the last W tokens readable; of a tail only the
    block of the next token is: what a group whose scales span a block has not quantised yet. Of a
    `state`, a recurrence's, a request keeps the block of its last token, from which the next one goes on.
    The number of blocks is a run-time number and not part of the type.
    """

    streams: tuple[Stream, ...]
    layers: int
    block: int = 16
    window: int | None = None
    tail: bool = False
    state: bool = False

    @property
    def needs_tail(self) -> bool:
        """Whether a block is quantised when it is full, and not before."""
        return any(s.per == CHANNEL for s in self.streams)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block over all the group's layers, not aligned."""
        return self.layers * sum(s.bytes_per_block(self.block) for s in self.streams)

    @property
    def bytes_per_token(self) -> int:
        """A block's bytes over its tokens, rounded up where tokens share a scale."""
        return -(-self.bytes_per_block // self.block)


Type = Tensor | KV
