"""A matrix whose rows are those of several, one after the other, as a stack of experts has them.

Codes, scales and offsets stay as they are. Where one matrix has a number for all zeros and another has a zero
for each group, all are given the latter.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np

from compiler.importers.arrangement import Rows
from compiler.importers.quantized.matrix import ZERO, Grid, Matrix
from compiler.weights import Array


class Unlike(Exception):
    """Matrices cannot be one: a sentence's part that says why."""


@dataclass(frozen=True)
class _Part:
    """Rows lo..hi of a matrix."""

    matrix: Matrix
    lo: int
    hi: int

    def rows(self, part: str, lo: int, hi: int, grid: Grid) -> Array:
        """Rows of a part as `grid` has it."""
        own = self.matrix.grid
        if part == ZERO and own.zeros is None:
            assert grid.zeros is not None
            return np.full((hi - lo, grid.num_groups), own.zero, grid.zeros.numpy)
        return self.matrix.rows(part, self.lo + lo, self.lo + hi)


class Joined:
    """Matrices, one below the other."""

    order = None

    def __init__(self, parts: Sequence[_Part], grid: Grid) -> None:
        self._parts, self.grid = parts, grid
        self._starts = [0, *accumulate(p.hi - p.lo for p in parts)]

    def rows(self, part: str, lo: int, hi: int) -> Array:
        found = list(self._found(part, lo, max(lo, hi)))
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _found(self, part: str, lo: int, hi: int) -> Iterator[Array]:
        """At least one array, which may have no rows."""
        index = min(bisect_right(self._starts, lo), len(self._parts)) - 1
        while True:
            start, stop = self._starts[index : index + 2]
            first, last = lo - start, max(lo, min(hi, stop)) - start
            yield self._parts[index].rows(part, first, last, self.grid)
            lo, index = max(lo, stop), index + 1
            if lo >= hi:
                return


def joined(rows: Sequence[Rows] | None, matrix: Callable[[str], Matrix | None]) -> Joined | None:
    """Rows of stored matrices as one; None where none of these is quantised. matrix: finds one by its name.

    rows: None for an array that is not made of whole rows. Raises Unlike.
    """
    if rows is None:
        raise Unlike("it is not made of whole rows of what is stored")
    by_name = {name: matrix(name) for name in dict.fromkeys(r.name for r in rows)}
    if not any(by_name.values()):
        return None
    first = next(m.grid for m in by_name.values() if m is not None)
    for name, found in by_name.items():
        if found is None:
            raise Unlike(f"{name!r} is not quantised, and others beside it are")
        if found.order is not None:
            raise Unlike(f"{name!r} has its columns in an order of its own (act-order)")
        if _format(found.grid) != _format(first):
            raise Unlike(f"{name!r} is {_text(found.grid)}, and another beside it {_text(first)}")
    parts = [_Part(m, r.lo, r.hi) for r in rows if (m := by_name[r.name]) is not None]
    return Joined(parts, _grid(parts))


def _format(grid: Grid) -> tuple[object, ...]:
    return grid.shape[1], grid.codes, grid.group_size, grid.scale, grid.offset


def _text(grid: Grid) -> str:
    size = f" in groups of {grid.group_size}" if grid.group_size else ""
    offset = " and offsets" if grid.offset else ""
    return f"{grid.codes}{size} of {grid.shape[1]} columns with scales{offset} of {grid.scale}"


def _grid(parts: Sequence[_Part]) -> Grid:
    """With a number for all zeros only where all matrices have the same."""
    grids = [p.matrix.grid for p in parts]
    zeros = next((g.zeros for g in grids if g.zeros is not None), None)
    if zeros is None and len({g.zero for g in grids}) > 1:
        zeros = grids[0].codes
    shape = sum(p.hi - p.lo for p in parts), grids[0].shape[1]
    return replace(grids[0], shape=shape, zeros=zeros, zero=grids[0].zero if zeros is None else 0)
