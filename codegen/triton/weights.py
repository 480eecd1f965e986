"""Which arrays the Triton kernels read. All lie row after row, in the graph's element type."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ir.graph import Value, Weight, tensor_of
from ir.types import DType


@dataclass(frozen=True)
class PlainWeight:
    """source: the weight, or the value computed from weights."""

    name: str
    source: Weight | Value
    dtype: DType
    shape: tuple[int, ...]
    layout: str = "plain"

    @property
    def packed_shape(self) -> tuple[int, ...]:
        return self.shape

    @property
    def bytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.size_bytes


@dataclass
class WeightTable:
    """Collects what kernels read, in the order of plan.json's `weight` operands."""

    order: list[PlainWeight] = field(default_factory=list[PlainWeight])
    _index: dict[str, int] = field(default_factory=dict[str, int])

    def use(self, arg: Weight | Value) -> tuple[int, PlainWeight]:
        """The array that holds an operand, and its index."""
        name = f"{'@' if isinstance(arg, Weight) else '%'}{arg.name}"
        index = self._index.setdefault(name, len(self.order))
        if index == len(self.order):
            found = tensor_of(arg)
            plain = arg.name if isinstance(arg, Weight) else name
            self.order.append(PlainWeight(plain, arg, found.dtype, tuple(int(d) for d in found.shape)))
        return index, self.order[index]
