"""Which arrays the Triton kernels read, and how they lie.

plain: row after row, in the graph's element type; codes of fewer than 8 bits have a byte each, and e4m3
numbers are bytes.
codes: a quantised matrix [N, K], rows of bytes that start on multiples of 16, the rest zeros. A code of 8
bits is a byte. Two codes of 4 bits are one: byte j of a row holds elements 2j, in its low bits, and 2j + 1,
so that a thread that loads 16 bytes has 32 neighbours along K, in order, without moving them between threads.
Scales, zeros and offsets [N, groups] are plain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from codegen.evaluate import Evaluator
from codegen.packing import chunk_rows
from ir.graph import Value, Weight, tensor_of
from ir.types import DType

Array = np.ndarray[Any, np.dtype[Any]]
PLAIN, CODES = "plain", "codes"  # layouts
ROW_BYTES = 16  # rows of codes are a multiple of


@dataclass(frozen=True)
class PackedWeight:
    """source: the weight, or the value computed from weights, of which `shape` and `elements` are.

    dtype: of the array, whose shape is packed_shape.
    """

    name: str
    source: Weight | Value
    dtype: DType
    shape: tuple[int, ...]
    elements: DType
    layout: str = PLAIN

    @property
    def packed_shape(self) -> tuple[int, ...]:
        if self.layout == PLAIN:
            return self.shape
        rows, size = self.shape
        return rows, row_bytes(self.elements, size)

    @property
    def bytes(self) -> int:
        return int(np.prod(self.packed_shape, dtype=np.int64)) * self.dtype.size_bytes


@dataclass
class WeightTable:
    """Collects what kernels read, in the order of plan.json's `weight` operands."""

    order: list[PackedWeight] = field(default_factory=list[PackedWeight])
    _index: dict[str, int] = field(default_factory=dict[str, int])

    def use(self, arg: Weight | Value, layout: str = PLAIN) -> tuple[int, PackedWeight]:
        """The array that holds an operand, and its index."""
        name = f"{'@' if isinstance(arg, Weight) else '%'}{arg.name}{'' if layout == PLAIN else ' ' + layout}"
        index = self._index.setdefault(name, len(self.order))
        if index == len(self.order):
            self.order.append(_packed(arg, layout))
        return index, self.order[index]


def _packed(arg: Weight | Value, layout: str) -> PackedWeight:
    found = tensor_of(arg)
    name = arg.name if isinstance(arg, Weight) else f"%{arg.name}"
    dtype = stored_dtype(found.dtype)
    shape = tuple(int(d) for d in found.shape)
    return PackedWeight(
        name + ("" if layout == PLAIN else f".{layout}"), arg, dtype, shape, found.dtype, layout
    )


def stored_dtype(dtype: DType) -> DType:
    """Of an array of such elements: kernels see what has no type of its own everywhere as bytes."""
    return DType.U8 if dtype in (DType.U2, DType.U4, DType.F8E4M3) else dtype


def per_byte(dtype: DType) -> int:
    """Codes in a byte; 1 of what takes more."""
    return max(1, 8 // dtype.bits)


def row_bytes(dtype: DType, size: int) -> int:
    """Bytes of a row of packed codes."""
    return -(-size // (per_byte(dtype) * ROW_BYTES)) * ROW_BYTES


def fill_weight(weight: PackedWeight, evaluator: Evaluator, out: Array, chunk_bytes: int = 16 << 20) -> None:
    """Write an array, out [packed_shape], a few rows at a time."""
    if not weight.shape:
        out[...] = evaluator.whole(weight.source)
        return
    step = chunk_rows(weight, chunk_bytes)
    for lo in range(0, weight.shape[0], step):
        hi = min(lo + step, weight.shape[0])
        rows = np.asarray(evaluator.rows(weight.source, lo, hi))
        out[lo:hi] = pack_rows(rows, weight.elements) if weight.layout == CODES else _as_stored(rows, weight)


def _as_stored(rows: Array, weight: PackedWeight) -> Array:
    if weight.elements is DType.F8E4M3:
        return rows.astype(DType.F8E4M3.numpy).view(np.uint8)
    return rows.astype(weight.dtype.numpy, copy=False)


def pack_rows(codes: Array, dtype: DType) -> Array:
    """Rows of codes [N, K] as rows of bytes."""
    codes = np.ascontiguousarray(codes.astype(dtype.numpy, copy=False))
    held = np.zeros((len(codes), row_bytes(dtype, codes.shape[1]) * per_byte(dtype)), np.uint8)
    held[:, : codes.shape[1]] = codes.view(np.uint8)
    packed = held[:, :: per_byte(dtype)].copy()
    for index in range(1, per_byte(dtype)):
        packed |= held[:, index :: per_byte(dtype)] << np.uint8(index * dtype.bits)
    return packed.view(stored_dtype(dtype).numpy)
