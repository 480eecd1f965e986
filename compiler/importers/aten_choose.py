"""Converters of ATen ops that choose along an axis: top-k, the greatest, gather, scatter and one-hot."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from compiler.importers.context import Context
from compiler.importers.refused import ImportRefused
from ir.types import DType

Convert = Callable[..., Any]


def _topk(c: Context, x: Any, k: Any, axis: int = -1, largest: bool = True, *_: Any) -> Any:
    """Values and indices, in falling order whether or not that is asked for."""
    if not largest:
        raise ImportRefused("the least elements have no op", todo="Take the largest of the negated ones")
    found = c.op("topk", _last(c, x, axis), k=k, several=True)
    return tuple(_back(c, f, axis) for f in found)


def _sort(c: Context, x: Any, axis: int = -1, descending: bool = False) -> Any:
    """In falling order: the largest of all. Equal ones stay in their order."""
    if not descending:
        raise ImportRefused("sorting in rising order has no op", todo="Sort in falling order")
    return _topk(c, x, c.type(x).shape[c.axis(x, axis)], axis)


def _sort_stable(c: Context, x: Any, *, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
    return _sort(c, x, dim, descending)


def _extreme(c: Context, x: Any, axis: int, keepdim: bool = False, *, least: bool = False) -> tuple[Any, Any]:
    """The greatest element along an axis, and where the first one like it is; a NaN comes before all."""
    flip = _flipped if least else lambda _, x: x
    found, at = _topk(c, flip(c, x), 1, axis), c.axis(x, axis)
    shape = c.type(found[0]).shape
    shape = shape if keepdim else (*shape[:at], *shape[at + 1 :])
    return c.reshape(flip(c, found[0]), shape), c.reshape(found[1], shape)


def _flipped(c: Context, x: Any) -> Any:
    """In reverse order. Of an integer x, -1 - x, as the least has no negative."""
    return c.op("neg", x) if c.type(x).dtype.is_float else c.op("sub", c.literal(-1, c.type(x).dtype), x)


def _where_extreme(least: bool) -> Convert:
    def convert(c: Context, x: Any, axis: int | None = None, keepdim: bool = False) -> Any:
        if axis is None:
            raise ImportRefused("the place of the greatest of all elements has no op", todo="Give it an axis")
        return _extreme(c, x, axis, keepdim, least=least)[1]

    return convert


def _gather(c: Context, x: Any, axis: int, index: Any, **_: Any) -> Any:
    """Rows of x beyond the index's are not read."""
    x, index = _last(c, c.tensor(x), axis), _last(c, index, axis)
    for at, size in enumerate(c.type(index).shape[:-1]):
        if c.type(x).shape[at] != size:
            x = c.op("slice", x, axis=at, start=0, stop=size)
    return _back(c, c.op("take_along", x, index), axis)


def _scatter(c: Context, x: Any, axis: int, index: Any, source: Any, **_: Any) -> Any:
    """x with elements replaced: where several come to one place, the greatest is taken (torch takes any)."""
    hit, given = _sources(c, x, axis, index, source)
    lowest = _lowest(c.out.dtype)
    value = _over_sources(c, "max", c.op("where", hit, given, c.literal(lowest, c.out.dtype)))
    return _where_hit(c, axis, hit, value, x)


def _scatter_value(c: Context, x: Any, axis: int, index: Any, value: Any, **_: Any) -> Any:
    hit = _hits(c, _last(c, c.tensor(x), axis), _last(c, index, axis))
    return _where_hit(c, axis, hit, c.operand(value, c.out.dtype), x)


def _scatter_add(c: Context, x: Any, axis: int, index: Any, source: Any) -> Any:
    hit, given = _sources(c, x, axis, index, source)
    added = _over_sources(c, "sum", c.op("where", hit, given, c.literal(0, c.out.dtype)))
    return _back(c, c.op("add", _last(c, c.tensor(x), axis), added), axis)


def _one_hot(c: Context, x: Any, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise ImportRefused("one_hot whose size depends on values", todo="Give it num_classes")
    shape = c.type(x).shape
    places = c.op("iota", size=num_classes, dtype=str(c.type(x).dtype))
    return c.cast(c.op("eq", c.reshape(x, (*shape, 1)), places), c.out.dtype)


def _sources(c: Context, x: Any, axis: int, index: Any, source: Any) -> tuple[Any, Any]:
    """Which source [.., k, 1] comes to which place: [.., k, E]; and the sources."""
    index, source = _last(c, index, axis), _last(c, c.tensor(source, c.out.dtype), axis)
    shape = c.type(index).shape
    for at, size in enumerate(shape):
        if c.type(source).shape[at] != size:
            source = c.op("slice", source, axis=at, start=0, stop=size)
    return _hits(c, _last(c, c.tensor(x), axis), index), c.reshape(source, (*shape, 1))


def _hits(c: Context, x: Any, index: Any) -> Any:
    """[.., k, E]: whether index j is place e."""
    shape, size = c.type(index).shape, c.type(x).shape[-1]
    if shape[:-1] != c.type(x).shape[:-1]:
        raise ImportRefused("a scatter into more rows than its index has no op", todo="Scatter into all rows")
    return c.op("eq", c.reshape(index, (*shape, 1)), c.op("iota", size=size, dtype="i32"))


def _where_hit(c: Context, axis: int, hit: Any, value: Any, x: Any) -> Any:
    """x with value at the places that any source comes to."""
    any_hit = c.cast(_over_sources(c, "max", c.cast(hit, DType.F32)), DType.BOOL)  # kernels reduce floats
    return _back(c, c.op("where", any_hit, value, _last(c, c.tensor(x), axis)), axis)


def _over_sources(c: Context, kind: str, x: Any) -> Any:
    """[.., k, E] -> [.., E]."""
    return c.op(kind, x, axes=(c.type(x).rank - 2,))


def _lowest(dtype: DType) -> float | int:
    if dtype.is_float:
        return float("-inf")
    if dtype is not DType.I32:
        raise ImportRefused(f"a scatter of {dtype} has no op", todo="Scatter floats or integers")
    return -(2**31) + 1


def _last(c: Context, x: Any, axis: int) -> Any:
    """x with an axis as its last."""
    axis, rank = c.axis(x, axis), c.type(x).rank
    perm = (*(i for i in range(rank) if i != axis), axis)
    return x if axis == rank - 1 else c.op("transpose", x, perm=perm)


def _back(c: Context, x: Any, axis: int) -> Any:
    """x with its last axis where _last took it from."""
    axis, rank = c.axis(x, axis), c.type(x).rank
    perm = (*range(axis), rank - 1, *range(axis, rank - 1))
    return x if axis == rank - 1 else c.op("transpose", x, perm=perm)


TABLE: dict[str, Convert] = {
    "aten.topk.default": _topk,
    "aten.sort.default": _sort,
    "aten.sort.stable": _sort_stable,
    "aten.argsort.default": lambda c, x, axis=-1, descending=False: _sort(c, x, axis, descending)[1],
    "aten.max.dim": _extreme,
    "aten.min.dim": partial(_extreme, least=True),
    "aten.argmax.default": _where_extreme(least=False),
    "aten.argmin.default": _where_extreme(least=True),
    "aten.gather.default": _gather,
    "aten.scatter.src": _scatter,
    "aten.scatter.value": _scatter_value,
    "aten.scatter_add.default": _scatter_add,
    "aten.one_hot.default": _one_hot,
}
