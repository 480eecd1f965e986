"""Masks that are arrays: a constant [N,N] of truth values, or of few different numbers, read at positions.

Each becomes boolean tables that a predicate reads as `Table(i, a, b)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import sympy

from ir.dims import Table
from ir.graph import Arg, Scalar, Value, Weight
from ir.interpret import WeightReader
from ir.predicates import Grid
from ir.types import DType, Tensor
from passes.attention.cases import Cases, CasesError, Element, always, exact, gather
from passes.attention.indexing import Index, shape_of
from passes.attention.proof import negation

MAX_LEVELS = 4

Emit = Callable[..., Value]


@dataclass(frozen=True)
class Entry:
    """A boolean table: where a weight, at fixed places on its other axes, equals `level` (None: is true)."""

    weight: Weight
    cut: tuple[int | None, ...]  # per axis the fixed place, None where positions index it
    level: float | int | None


@dataclass
class Tables:
    """The tables that masks of one graph read. Without a reader of weights no array can be followed.

    An emitted operand is used again, so whoever calls `emit` must keep the ops that it made.
    """

    read: WeightReader | None
    entries: list[Entry] = field(default_factory=list[Entry])
    grids: list[Grid] = field(default_factory=list[Grid])
    _operands: dict[int, Arg] = field(default_factory=dict[int, Arg])

    def at(self, weight: Weight, index: Index) -> Element:
        """The element of a weight at an index of positions."""
        if self.read is None:
            raise CasesError(f"reads @{weight.name}, whose data only a compile from a checkpoint has")
        cut = tuple(int(i) if i.is_Integer else None for i in index)
        free = [i for i in index if not i.is_Integer]
        array = np.asarray(self.read(weight.name))[tuple(slice(None) if c is None else c for c in cut)]
        if not free:
            return self._number(array)
        if len(free) > 2:
            raise CasesError(
                f"reads @{weight.name}{list(weight_shape(weight))} at more than two axes of positions"
            )
        grid = array.reshape((1,) * (2 - len(free)) + array.shape)
        at = (sympy.Integer(0),) * (2 - len(free)) + tuple(free)
        if array.dtype == np.bool_:
            return Table(self._register(Entry(weight, cut, None), grid), *at)
        return self._levels(weight, cut, grid, at)

    @staticmethod
    def _number(array: Any) -> Element:
        if array.dtype == np.bool_:
            return sympy.true if bool(array) else sympy.false
        return always(exact(float(array) if np.issubdtype(array.dtype, np.floating) else int(array)))

    def _levels(self, weight: Weight, cut: tuple[int | None, ...], grid: Grid, at: Index) -> Cases:
        """An array of at most MAX_LEVELS different numbers, as a case for each."""
        levels = _levels_of(weight, grid)
        pairs: list[tuple[Any, Any]] = []
        rest: Any = sympy.true
        for level in levels[:-1]:
            entry = Entry(weight, cut, level)
            here = Table(self._register(entry, np.asarray(grid == level)), *at)
            pairs.append((exact(level), here))
            rest = negation(here) & rest
        return gather([*pairs, (exact(levels[-1]), rest)])

    def _register(self, entry: Entry, grid: Grid) -> int:
        """The number of a table; tables that say the same are one."""
        for i, (known, other) in enumerate(zip(self.entries, self.grids, strict=True)):
            if known == entry or np.array_equal(other, grid):
                return i
        self.entries.append(entry)
        self.grids.append(grid)
        return len(self.grids) - 1

    def emit(self, predicate: Any, emit: Emit) -> tuple[Any, tuple[Arg, ...]]:
        """The predicate with its tables numbered from 0, and the operands that hold them [N,M]."""
        used = sorted({int(t.args[0]) for t in cast("set[Any]", predicate.atoms(Table))})
        places = {old: new for new, old in enumerate(used)}
        renumbered = {t: Table(places[int(t.args[0])], *t.args[1:]) for t in predicate.atoms(Table)}
        return predicate.xreplace(renumbered), tuple(self._operand(i, emit) for i in used)

    def keep(self, number: int, operand: Arg) -> None:
        """Read a table from an operand that holds it already."""
        self._operands.setdefault(number, operand)

    def _operand(self, number: int, emit: Emit) -> Arg:
        """The operand [N,M] that holds a table; its ops are emitted once."""
        if number not in self._operands:
            self._operands[number] = _emit_table(self.entries[number], self.grids[number].shape, emit)
        return self._operands[number]


def _emit_table(entry: Entry, shape: tuple[int, ...], emit: Emit) -> Arg:
    arg: Value | Weight = entry.weight
    for axis, place in enumerate(entry.cut):
        if place is not None and shape_of(arg)[axis] != 1:
            arg = emit("slice", arg, axis=axis, start=place, stop=place + 1)
    if shape_of(arg) != shape:
        arg = emit("reshape", arg, shape=shape)
    return arg if entry.level is None else emit("eq", arg, Scalar(entry.level))


def weight_shape(weight: Weight) -> tuple[Any, ...]:
    return weight.type.shape if isinstance(weight.type, Tensor) else ()


def _levels_of(weight: Weight, grid: Grid) -> list[float | int]:
    """The different numbers in an array, the greatest (what is kept) first."""
    is_float = (
        isinstance(weight.type, Tensor) and weight.type.dtype is not DType.BOOL and weight.type.dtype.is_float
    )
    rest = grid.reshape(-1)
    found: list[float | int] = []
    while rest.size:
        if len(found) == MAX_LEVELS or (is_float and np.isnan(rest[0])):
            raise CasesError(f"reads @{weight.name}, an array of many different numbers, which is not a mask")
        found.append(float(rest[0]) if is_float else int(rest[0]))
        rest = rest[rest != rest[0]]
    return sorted(found, reverse=True)
