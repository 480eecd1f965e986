"""Biases of scores by distance: what is added that is a function of the head and of q - k alone, which
becomes one table [H,N] (relative positions: arXiv 1910.10683, 2205.09921).

A value's producers are walked back from its element (h, q, k). Where the element is a * (q - k) + b, for all
positions, the same of a vector of distances stands for it; the ops from there on are done again, on that
vector, and on what weights alone make.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import sympy

from ir.dims import FloorDiv
from ir.graph import Arg, Op, Scalar, Value, Weight
from ir.ops import OPS
from ir.predicates import KEY, QUERY
from ir.types import DType, Tensor
from passes.attention.arithmetic import VERY_LOW
from passes.attention.cases import Cases
from passes.attention.elements import HEAD, Elements, Unreadable
from passes.attention.indexing import Index, broadcast, flatten, pull, shape_of
from passes.match import dtype as dtype_of

Emit = Callable[..., Value]

_D = sympy.Symbol("distance", integer=True)
_PLACE = "place"  # symbols of other integers that distances make are called so, and a number
_ALONG = sympy.Symbol("along")  # an axis of distances, in an index
_COMPARE = ("lt", "le", "gt", "ge", "eq", "ne")


class NotByDistance(ValueError):
    """A value that cannot be shown to be a function of the head and the distance alone."""


@dataclass
class ByDistance:
    """Does a graph's ops again for the distances given, i32 [N]. Results are [H or 1, N or 1]."""

    elements: Elements
    emit: Emit
    distances: Value
    has_low: bool = False  # whether a literal was met that is large enough to hide keys
    _done: dict[Any, Arg] = field(default_factory=dict[Any, Arg])
    _places: dict[Any, Arg] = field(default_factory=dict[Any, Arg])  # the vectors of symbols

    def at(self, arg: Arg, index: Index) -> Arg:
        """Element `index` of an operand, for every head and distance. Raises NotByDistance."""
        if isinstance(arg, Scalar):
            self.has_low |= abs(arg.value) >= -VERY_LOW
            return arg
        if not isinstance(arg, Value | Weight):
            raise NotByDistance("an operand is missing")
        key = (arg, index)
        if key not in self._done:
            self._done[key] = self._at(arg, index)
        return self._done[key]

    def _at(self, arg: Value | Weight, index: Index) -> Arg:
        used = set[Any]().union(*(i.free_symbols for i in index))
        if not used & {QUERY, KEY, *self._places}:
            if not self.elements.is_static(arg):
                raise NotByDistance("it depends on the tokens")
            return self._arranged(arg, index)
        if isinstance(arg, Weight):
            raise NotByDistance(f"it reads @{arg.name} at positions")
        op = self.elements.producer(arg)
        if op is None:
            raise NotByDistance(f"it depends on the input %{arg.name}")
        line = self._line(arg, index)
        return self._again(op, arg, index) if line is None else line

    def _again(self, op: Op, out: Value, index: Index) -> Arg:
        moved = pull(op, out.name, index, self.elements.sizes)
        if moved is not None:
            return self.at(*moved)
        if op.kind == "embed":
            return self._gathered(op.args[1], op.args[0], 0, index)
        if op.kind == "take":
            return self._gathered(op.args[0], op.args[1], op.attr("axis"), index)
        if op.kind == "full":
            self.has_low |= abs(op.attr("value")) >= -VERY_LOW
            return self.emit("full", **{**op.attrs, "shape": (1, 1)})
        if not OPS[op.kind].pointwise:
            raise NotByDistance(f"{op.kind} is not done element by element")
        return self.emit(op.kind, *self._operands(op, index), **op.attrs)

    def _operands(self, op: Op, index: Index) -> list[Arg]:
        """Of a pointwise op. Positions that are compared are, by their difference."""
        try:
            return [self.at(a, broadcast(index, shape_of(a))) for a in op.args]
        except NotByDistance:
            if op.kind not in _COMPARE:
                raise
            x, y = (self._leaf(a, broadcast(index, shape_of(a))) for a in op.args)
            line = None if x is None or y is None else self._drawn(x - y, DType.I32)
            if line is None:
                raise
            return [line, Scalar(0)]

    def _leaf(self, arg: Arg, index: Index) -> Any:
        """The element as one expression of positions, where it is one."""
        try:
            found = self.elements.at(arg, index)
        except Unreadable:
            return None
        return found.only if isinstance(found, Cases) else None

    def _line(self, value: Value, index: Index) -> Arg | None:
        """The element as a * distance + b, or the same of another integer that distances make."""
        leaf = self._leaf(value, index)
        return None if leaf is None else self._drawn(leaf, cast(Tensor, value.type).dtype)

    def _drawn(self, leaf: Any, dtype: DType) -> Value | None:
        leaf = sympy.expand(leaf.xreplace({QUERY: KEY + _D}))
        (x, *others) = leaf.free_symbols or {_D}
        slope, start = leaf.coeff(x, 1), leaf.coeff(x, 0)
        if others or x not in {_D, *self._places} or sympy.expand(leaf - slope * x - start) != 0:
            return None
        if slope.free_symbols or start.free_symbols or not start.is_finite:
            return None
        if not dtype.is_float and not (slope.is_Integer and start.is_Integer):
            return None
        number = float if dtype.is_float else int
        line = self._vector(x)
        line = line if dtype_of(line) is dtype else self.emit("cast", line, dtype=str(dtype))
        line = line if slope == 1 else self.emit("mul", line, Scalar(number(slope)))
        return line if start == 0 else self.emit("add", line, Scalar(number(start)))

    def _vector(self, symbol: Any) -> Value:
        if symbol != _D:
            return cast(Value, self._places[symbol])
        return self.emit("reshape", self.distances, shape=(1, shape_of(self.distances)[0]))

    def _gathered(self, table: Arg, rows: Arg, axis: int, index: Index) -> Arg:
        """Rows of an array that weights make, at distances; or of one that positions make, at other ones."""
        rank = len(shape_of(rows))
        at, before, after = index[axis : axis + rank], index[:axis], index[axis + rank :]
        if not isinstance(table, Value | Weight) or not self.elements.is_static(table):
            return self.at(table, (*before, self._place(rows, at), *after))
        row = self._row(rows, at)
        flat = self.emit("reshape", row, shape=(shape_of(row)[1],))
        return self._arranged(self.emit("take", table, flat, axis=axis), (*before, _ALONG, *after))

    def _row(self, rows: Arg, index: Index) -> Arg:
        row = self.at(rows, index)
        if isinstance(row, Scalar) or shape_of(row)[0] != 1:
            raise NotByDistance("it reads an array at places that differ between heads")
        return row

    def _place(self, rows: Arg, index: Index) -> Any:
        """A symbol for the integers that distances make."""
        row = self._row(rows, index)
        found = next((s for s, a in self._places.items() if a is row), None)
        if found is None:
            found = sympy.Symbol(f"{_PLACE}{len(self._places)}", integer=True)
            self._places[found] = row
        return found

    def _arranged(self, arg: Value | Weight, index: Index) -> Value:
        """An array at an index of numbers, heads and distances."""
        heads = self.elements.sizes[HEAD]
        for axis, i in enumerate(index):
            if i.is_Integer and shape_of(arg)[axis] != 1:
                arg = self.emit("slice", arg, axis=axis, start=int(i), stop=int(i) + 1)
            elif _repeats(i):
                which = self.emit("floordiv", self.emit("iota", size=heads), Scalar(int(i.args[1])))
                arg, index = self.emit("take", arg, which, axis=axis), _replaced(index, axis, HEAD)
        long = [(a, i) for a, i in enumerate(index) if not i.is_Integer]
        shape = shape_of(arg)
        by_head = [a for a, i in long if i != _ALONG]
        sizes = [shape[a] for a in by_head]
        count = int(sympy.prod(sizes))
        if count not in (1, heads) or flatten([index[a] for a in by_head], sizes) not in (0, HEAD):
            raise NotByDistance("it reads an array at places that are neither heads nor distances")
        along = [a for a, i in long if i == _ALONG]
        perm = (*(a for a, i in enumerate(index) if i.is_Integer), *by_head, *along)
        if perm != tuple(range(len(perm))):
            arg = self.emit("transpose", arg, perm=perm)
        return self.emit("reshape", arg, shape=(count, shape[along[0]] if along else 1))


def _repeats(i: Any) -> bool:
    """h // n: a head that several query heads share."""
    return isinstance(i, FloorDiv) and i.args[0] == HEAD and bool(i.args[1].is_Integer)


def _replaced(index: Sequence[Any], axis: int, i: Any) -> Index:
    return (*index[:axis], i, *index[axis + 1 :])
