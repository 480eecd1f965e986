"""A quantised matrix of a checkpoint: what it is made of, and its parts by rows.

w[n, k] = (codes[n, k] - zero[n, g]) * scale[n, g] + offset[n, g], each step in f32; g = k // group_size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from compiler.weights import Array
from ir.ops.quantize import dequantize
from ir.types import DType, Tensor

CODES, SCALE, ZERO, OFFSET = "q", "scale", "zero", "offset"


@dataclass(frozen=True)
class Grid:
    """Types and sizes of the parts of a matrix [N, K].

    group_size: elements of K that share a scale; 0: all of them. zero: what all groups subtract from codes;
    zeros: the type of what each has instead. offset: the type of what is added; None: nothing.
    """

    shape: tuple[int, int]
    codes: DType
    group_size: int
    scale: DType
    zero: int = 0
    zeros: DType | None = None
    offset: DType | None = None

    @property
    def num_groups(self) -> int:
        return -(-self.shape[1] // self.group_size) if self.group_size else 1

    def parts(self) -> Iterator[tuple[str, Tensor]]:
        """The name and type of each part, codes first, in the order in which `dequantize` takes them."""
        yield CODES, Tensor(self.codes, self.shape)
        for name, dtype in ((SCALE, self.scale), (ZERO, self.zeros), (OFFSET, self.offset)):
            if dtype is not None:
                yield name, Tensor(dtype, (self.shape[0], self.num_groups))


def within(group_size: int, width: int) -> int:
    """A size of groups, 0 where one takes all of a row."""
    return group_size if group_size < width else 0


class Matrix(Protocol):
    """A quantised matrix, in its file."""

    @property
    def grid(self) -> Grid: ...

    @property
    def order(self) -> Array | None:
        """[K]: the column of the weight that each column of the codes is; None where they are in order."""
        ...

    def rows(self, part: str, lo: int, hi: int) -> Array:
        """Rows lo..hi of a part, in its type: one code in each byte."""
        ...


def float_rows(matrix: Matrix, lo: int, hi: int) -> Array:
    """Rows lo..hi of what the matrix stands for, f32, columns in the weight's order."""
    grid = matrix.grid
    found = {name: matrix.rows(name, lo, hi) for name, _ in grid.parts()}
    zero = found.get(ZERO, grid.zero or None)
    with np.errstate(all="ignore"):  # a scale may be infinite: --check and the trial find it
        w = dequantize(found[CODES], found[SCALE], zero, found.get(OFFSET), grid.group_size)
    if matrix.order is None:
        return w
    placed = np.empty_like(w)
    placed[:, matrix.order] = w
    return placed
