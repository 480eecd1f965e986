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
    """

    name: str
    source: Weight | Value
    layout: str
    dtype: DType
    shape: tuple[int, ...]
    matrix: Matrix | None = None

    @property
    def packed_shape(self) -> tuple[int, ...]:
        if self.layout in ("plain", "table"):
            return self.shape
        halves = 2 if self.layout == "paired" else 1
        rows, k = self.shape
        panels = -(-(rows // halves) // PANEL) * halves
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
    _index: dict[tuple[str, str] | tuple[Matrix, str], int] = field(
        default_factory=dict[tuple[str, str] | tuple[Matrix, str], int]
    )

    def use(self, arg: Weight | Value, layout: str) -> tuple[int, PackedWeight]:
        """The array that holds an operand in a layout, and its index."""
        index = self._index.setdefault((key(arg), layout), len(self.order))
        if index == len(self.order):
            self.order.append(_packed(arg, layout))
        return index, self.order[index]

    def use_matrix(self, matrix: Matrix, layout: str) -> int:
        """The index of the array that holds a quantised matrix in a layout."""
        index = self._index.setdefault((matrix, layout), len(self.order))
        if index == len(self.order):
            name = f"{_name(matrix.codes)}.{layout}"
            if any(name == other.name for other in self.order):  # the same codes with other scales
                name = f"{_name(matrix.codes)}.{index}.{layout}"
            self.order.append(PackedWeight(name, matrix.codes, layout, DType.U8, matrix.shape, matrix))
        return index


def _packed(arg: Weight | Value, layout: str) -> PackedWeight:
    found = tensor_of(arg)
    shape = tuple(int(d) for d in found.shape)
    return PackedWeight(f"{_name(arg)}.{layout}", arg, layout, packed_dtype(found.dtype, layout), shape)


def _name(arg: Weight | Value) -> str:
    return arg.name if isinstance(arg, Weight) else key(arg)
