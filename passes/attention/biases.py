"""Scores read with what is added by distance as one symbol, and the table that it all becomes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.dims import normalize, upper_bound
from ir.graph import Arg, Op, Scalar, Value
from ir.interpret import Array
from ir.ops import InferError
from ir.predicates import KEY, QUERY
from passes.attention import arithmetic
from passes.attention.arithmetic import VERY_LOW
from passes.attention.cases import Cases, Element, always
from passes.attention.distances import ByDistance, NotByDistance
from passes.attention.elements import DISTANCES, HEAD, Elements, Unreadable, cases_of, concatenated
from passes.attention.indexing import Index, Sizes, broadcast, pull, shape_of
from passes.attention.static import Copy, NotStatic
from passes.match import is_float

Emit = Callable[..., Value]
Terms = Sequence[tuple[Any, Any]]  # (symbol of what is added by distance, factor)

_SUMS = ("add", "sub", "neg", "cast", "where")


@dataclass(frozen=True)
class Biases:
    """Reads elements of scores as Elements does. What is added by distance is a symbol of `elements`."""

    elements: Elements

    @property
    def sizes(self) -> Sizes:
        return self.elements.sizes

    def at(self, arg: Arg, index: Index) -> Element:
        """Element `index` of an operand. Raises Unreadable."""
        used = set[Any]().union(*(i.free_symbols for i in index))
        if not isinstance(arg, Value) or not is_float(arg) or not {QUERY, KEY} <= used:
            return self.elements.at(arg, index)
        try:
            plain = self.elements.at(arg, index)
            if isinstance(plain, Cases) and not any(leaf.free_symbols for leaf, _ in plain.items):
                return plain  # a mask
        except Unreadable:
            plain = None
        op = self.elements.producer(arg)
        if op is not None and len(op.outs) == 1 and is_bias(self.elements, arg, index):
            return always(self.elements.opaque_symbol(op, index, DISTANCES))
        parts = None if op is None else self._parts(op, arg, index)
        return self.elements.at(arg, index) if parts is None else parts

    def _parts(self, op: Op, out: Value, index: Index) -> Element | None:
        """The element from those of its terms; None for an op that does not add."""
        moved = pull(op, out.name, index, self.sizes)
        if moved is not None:
            return self.at(*moved)
        if op.kind == "concat":
            return concatenated(self, op, index)
        scales = op.kind in ("mul", "div") and any(isinstance(a, Scalar) for a in op.args)
        if not scales and op.kind not in _SUMS:
            return None
        operands = [(a, broadcast(index, shape_of(a))) for a in op.args]
        with cases_of(op):
            return arithmetic.apply(op, [self.at(*a) for a in operands], self.elements.limit)


def is_bias(elements: Elements, arg: Value, index: Index) -> bool:
    """Whether an element is a function of head and distance, and a number that hides nothing."""
    has_low = False

    def make(again: ByDistance) -> Arg:
        nonlocal has_low
        found, has_low = again.at(arg, index), again.has_low
        return found

    try:
        later, seen = _evaluated(elements, make)
    except NotByDistance:
        return False
    lowest = VERY_LOW if has_low else -np.finfo(np.float32).max
    return bool(np.isfinite(seen).all()) and not bool((later < lowest).any() or (seen < lowest).any())


def table(elements: Elements, terms: Terms, slopes: Arg, emit: Emit) -> Value:
    """The sum of what is added by distance, f32 [H,N], slopes [H] among it.

    N: the context, or less where all further distances have the same number.
    """
    heads = elements.sizes[HEAD]

    def total(again: ByDistance) -> Value:
        found: Value | None = None
        for symbol, factor in terms:
            source = elements.opaque[symbol]
            part = _f32(again.at(source.op.out, source.index), again.emit)
            part = part if factor == 1 else again.emit("mul", part, Scalar(float(factor)))
            found = part if found is None else again.emit("add", found, part)
        if slopes is not None:
            back = again.emit("neg", again.emit("cast", again.distances, dtype="f32"))
            part = again.emit("mul", again.emit("reshape", _f32(slopes, again.emit), shape=(heads, 1)), back)
            found = part if found is None else again.emit("add", found, part)
        assert found is not None
        return again.emit("expand", found, shape=(heads, shape_of(again.distances)[0]))

    _, numbers = _evaluated(elements, total)
    changes = np.flatnonzero((numbers[:, 1:] != numbers[:, :-1]).any(0))
    count = int(changes[-1]) + 2 if changes.size else 1
    return total(ByDistance(elements, emit, emit("iota", size=count)))


def _evaluated(elements: Elements, make: Callable[[ByDistance], Arg]) -> tuple[Array, Array]:
    """What is made of distances, [H or 1, ..]: of those of later keys, and of 0 to the context."""
    context = upper_bound(normalize(elements.sizes[QUERY]), elements.dims)
    if context is None:
        raise NotByDistance("the context has no limit")
    copy = Copy.named("biases", elements.producer)
    try:
        distances = copy.emit("sub", copy.emit("iota", size=2 * context - 1), Scalar(context - 1))
        made = copy.emit("cast", make(ByDistance(elements, copy.emit, distances)), dtype="f32")
        found = copy.evaluate(made, elements.tables.read)
    except (InferError, NotStatic) as error:
        raise NotByDistance(str(error)) from None
    found = np.broadcast_to(found, (found.shape[0], 2 * context - 1))
    return found[:, : context - 1], found[:, context - 1 :]


def _f32(arg: Arg, emit: Emit) -> Value:
    return emit("cast", arg, dtype="f32")
