"""Which arrays the kernels read, and in which layout."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from codegen.cpp.quantized import Matrix
from codegen.cpp.spelling import key
from ir.graph import Value, Weight, tensor_of
from ir.types import DType

PANEL = 16  # outputs side by side in a panel: the lanes of a vector, W in vec.h
PAIR = 2  # elements of K side by side in a panel of bf16


@dataclass(frozen=True)
class PackedWeight:
    """One array of the packed file.

    layout: "panels" ([N/16][K][16], or in pairs along K for bf16, [N/16][K/2][16][2]; filled up with zeros),
    "paired" (panels of the two halves, alternating: gate, up), "table" (rows to look up) or "plain".
    source: the weight, or the value computed from weights. dtype: as packed. shape: before packing.
    matrix: what is packed where it is quantised, panels or paired, in bytes; its codes are the source.
    experts: of so many the matrix is stacked, [E*N,K], each of which is packed as a matrix of its own.
    """

    name: str
    source: Weight | Value
    layout: str
    dtype: DType
    shape: tuple[int, ...]
    matrix: Matrix | None = None
    experts: int = 1

    @property
    def panels(self) -> int:
        """Of one expert."""
        halves = 2 if self.layout == "paired" else 1
        return -(-(self.shape[0] // self.experts // halves) // PANEL) * halves

    @property
    def packed_shape(self) -> tuple[int, ...]:
        if self.layout in ("plain", "table"):
            return self.shape
        panels, k = self.experts * self.panels, self.shape[1]
        if self.matrix is not None:
            return (panels, self.matrix.panel_bytes)
        return (panels, -(-k // PAIR), PANEL, PAIR) if self.dtype is DType.BF16 else (panels, k, PANEL)

    @property
    def bytes(self) -> int:
        return int(np.prod(self.packed_shape, dtype=np.int64)) * self.dtype.size_bytes


def packed_dtype(dtype: DType, layout: str) -> DType:
    """bf16 stays bf16 in panels and embedding tables; other 16-bit floats are widened, without loss."""
    if dtype is DType.F16 or (dtype is DType.BF16 and layout == "plain"):
        return DType.F32
    return dtype


@dataclass
class WeightTable:
    """Collects what kernels read, in the order of the C ABI: one array per source and layout."""

    order: list[PackedWeight] = field(default_factory=list[PackedWeight])
    _index: dict[tuple[str | Matrix, str, int], int] = field(
        default_factory=dict[tuple[str | Matrix, str, int], int]
    )

    def use(self, arg: Weight | Value, layout: str, experts: int = 1) -> tuple[int, PackedWeight]:
        """The array that holds an operand in a layout, and its index."""
        index = self._index.setdefault((key(arg), layout, experts), len(self.order))
        if index == len(self.order):
            found = tensor_of(arg)
            shape, dtype = tuple(int(d) for d in found.shape), packed_dtype(found.dtype, layout)
            name = self._unused(_name(arg), layout)
            self.order.append(PackedWeight(name, arg, layout, dtype, shape, experts=experts))
        return index, self.order[index]

    def use_matrix(self, matrix: Matrix, layout: str, experts: int = 1) -> int:
        """The index of the array that holds a quantised matrix in a layout."""
        index = self._index.setdefault((matrix, layout, experts), len(self.order))
        if index == len(self.order):
            name, codes = self._unused(_name(matrix.codes), layout), matrix.codes
            self.order.append(PackedWeight(name, codes, layout, DType.U8, matrix.shape, matrix, experts))
        return index

    def _unused(self, name: str, layout: str) -> str:
        """A name in the file; the same codes may have other scales, the same matrix other experts."""
        found = f"{name}.{layout}"
        return f"{name}.{len(self.order)}.{layout}" if any(found == w.name for w in self.order) else found


def _name(arg: Weight | Value) -> str:
    return arg.name if isinstance(arg, Weight) else key(arg)
