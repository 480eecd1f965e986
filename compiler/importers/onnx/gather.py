"""Converters of ONNX's gathers and running sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import sympy

from compiler.importers.onnx.context import Context, Convert, Held, Known, plain_array
from compiler.importers.onnx.formula import Formula, axis, formula, moved
from compiler.importers.onnx.shape import cut, reshape
from compiler.importers.refused import ImportRefused
from ir.types import DType


def _gather(c: Context, x: Held, index: Held, *, axis: int = 0) -> Held:
    number = c.axis(x, axis)
    size = c.shape(x)[number]
    if isinstance(x, Known) and isinstance(index, Known) and index.array.dtype != object:
        _check_inside(index.array, size)
        found = np.take(x.array, index.array, number)
        return Known(plain_array(found) if x.array.dtype == object else found)
    if isinstance(index, Known) and index.array.size == 1:
        return _one(c, x, index, number)
    index = _from_start(index, size)
    if isinstance(index, Formula) and (source := c.as_formula(x)) is not None:
        return _composed(source, index, number)
    c.check_rows(index, x, size)
    return rows(c, x, index, number)


def _check_inside(index: Any, size: Any) -> None:
    if index.size and not (-size <= index.min() and index.max() < size):
        raise ImportRefused(f"indices {index.min()}..{index.max()} of an axis of {size}")


def _from_start(index: Held, size: Any) -> Held:
    """Indices of which negative ones, which count from the end, are counted from the start."""
    if isinstance(index, Known) and isinstance(size, int):
        _check_inside(index.array, size)
        return Known(np.where(index.array < 0, index.array + size, index.array))
    return index


def _one(c: Context, x: Held, index: Known, number: int) -> Held:
    """One place of an axis: a slice without the axis, or with those of the index."""
    place, size = index.number, c.shape(x)[number]
    if isinstance(place, int) and isinstance(size, int):
        _check_inside(index.array, size)
    start = place + size if isinstance(place, int) and place < 0 else place
    found = cut(c, x, number, start, start + 1)
    shape = c.shape(x)
    return reshape(c, found, (*shape[:number], *index.shape, *shape[number + 1 :]))


def rows(c: Context, x: Held, index: Held, number: int) -> Held:
    """x at indices of an axis: an embedding where x is a matrix of weights."""
    table, at = c.tensor(x), c.tensor(index)
    if number == 0 and c.rank(table) == 2 and c.is_constant(table) and c.dtype(table).is_float:
        return c.op("embed", at, table)
    return c.op("take", table, at, axis=number)


def _composed(x: Formula, index: Formula, number: int) -> Formula:
    """A formula at places that another gives."""
    rank = index.rank
    shape = (*x.shape[:number], *index.shape, *x.shape[number + 1 :])
    inner = moved(index.expr, {axis(i): axis(i + number) for i in range(rank)})
    places = {axis(i): axis(i + rank - 1) for i in range(number + 1, x.rank)} | {axis(number): inner}
    return formula(x.dtype, shape, moved(x.expr, places))


def _gather_nd(c: Context, x: Held, index: Held, *, batch_dims: int = 0) -> Held:
    """Of formulas: each row of indices says where along the first axes."""
    source, places = c.as_formula(x), c.as_formula(index)
    if source is None or places is None or batch_dims:
        raise ImportRefused("of what depends on the tokens it has no op")
    count = places.shape[-1]
    if not isinstance(count, int):
        raise ImportRefused(f"with {count} indices")
    rank = places.rank - 1
    found = {axis(i): moved(places.expr, {axis(rank): sympy.Integer(i)}) for i in range(count)}
    rest = {axis(i): axis(i - count + rank) for i in range(count, source.rank)}
    shape = (*places.shape[:-1], *source.shape[count:])
    return formula(source.dtype, shape, moved(source.expr, {**found, **rest}))


def _cumsum(c: Context, x: Held, given: Held, *, exclusive: int = 0, reverse: int = 0) -> Held:
    """Of the same number all along it is a count, which is how positions are made from a mask of ones."""
    number = c.axis(x, c.integers(given, "axis")[0])
    if exclusive or reverse:
        raise ImportRefused("a running sum from the end, or without the element itself, has no op")
    if isinstance(x, Known) and x.array.dtype != object:
        return Known(np.cumsum(x.array, number).astype(x.array.dtype))
    if isinstance(x, Formula) and x.dtype is DType.I32 and axis(number) not in x.expr.free_symbols:
        return formula(DType.I32, x.shape, x.expr * (axis(number) + 1))
    return c.op("cumsum", c.tensor(x), axis=number)


def reduced(kind: str) -> Convert:
    """axes: an attribute, or from op set 13 (Sum) or 18 on an operand."""

    def convert(
        c: Context,
        x: Held,
        given: Held | None = None,
        *,
        axes: Any = None,
        keepdims: int = 1,
        noop_with_empty_axes: int = 0,
    ) -> Held:
        numbers = list(axes) if axes is not None else [] if given is None else c.integers(given, "axes")
        if not numbers and noop_with_empty_axes:
            return x
        places = tuple(sorted(c.axis(x, n) for n in numbers)) or tuple(range(c.rank(x)))
        if isinstance(x, Known) and x.array.dtype != object:
            return Known(_FOLDED[kind](x.array, axis=places, keepdims=bool(keepdims)))
        if isinstance(x, Known):
            return _sum_of_sizes(kind, x, places, bool(keepdims))
        if isinstance(x, Formula) and not any(axis(i) in x.expr.free_symbols for i in places):
            return _of_the_same(kind, x, places, bool(keepdims))
        return c.op(kind, c.tensor(x), axes=places, keepdims=bool(keepdims))

    return convert


_FOLDED = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod}


def _sum_of_sizes(kind: str, x: Known, places: tuple[int, ...], keepdims: bool) -> Known:
    if kind not in ("sum", "prod"):
        raise ImportRefused(f"the {kind} of sizes has no op")
    return Known(plain_array(_FOLDED[kind](x.array, axis=places, keepdims=keepdims)))


def _of_the_same(kind: str, x: Formula, places: tuple[int, ...], keepdims: bool) -> Held:
    """A reduction along axes on which every element is the same."""
    expr = x.expr
    for place in places if kind == "sum" else ():
        expr = expr * x.shape[place]
    kept = [i for i in range(x.rank) if keepdims or i not in places]
    shape = [1 if i in places else x.shape[i] for i in kept]
    places_now = {axis(i): axis(new) for new, i in enumerate(kept)}
    found = formula(x.dtype, shape, moved(expr, places_now))
    if found.is_constant and all(n == 1 for n in found.shape):
        return Known(plain_array(np.full((1,) * len(shape), expr, object)))
    return found


TABLE: dict[str, Convert] = {
    "Gather": _gather,
    "GatherND": _gather_nd,
    "CumSum": _cumsum,
    "ReduceSum": reduced("sum"),
    "ReduceMean": reduced("mean"),
    "ReduceMax": reduced("max"),
    "ReduceProd": reduced("prod"),
}
