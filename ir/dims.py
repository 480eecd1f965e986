"""Symbolic sizes: integers or sympy expressions over named symbols.

An upper-case name (`T`, `M0`) is a size: a positive integer whose bounds the graph keeps. A lower-case name
(`q`, `k`) is a position: a non-negative integer, used in attention-mask predicates. Division is
`FloorDiv`/`CeilDiv`, because sympy's floor((T+15)/16) prints as floating point and is not ceiling(T/16).

Text is read by `ir.text`'s own grammar, never by sympify, which runs code.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, cast

import sympy
from sympy.logic.boolalg import Boolean, BooleanAtom

Expr = sympy.Basic
Dim = int | sympy.Expr
Bounds = tuple[int, int | None]


class FloorDiv(sympy.Function):
    """floor(a / b) over integers, b > 0."""

    nargs = (2,)
    is_integer = True

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if b == 1:
            return a
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(int(a) // int(b))
        return None


class CeilDiv(sympy.Function):
    """ceil(a / b) over integers, b > 0."""

    nargs = (2,)
    is_integer = True

    @classmethod
    def eval(cls, a: Any, b: Any) -> Any:
        if b == 1:
            return a
        if a.is_Integer and b.is_Integer:
            return sympy.Integer(-(-int(a) // int(b)))
        return None


class Table(Boolean, sympy.Function):  # type: ignore[misc]
    """Table(i, a, b): entry [a, b] of an attention op's i-th boolean mask table."""

    nargs = (3,)


def symbol(name: str) -> sympy.Symbol:
    """The one symbol of this name; equal names give equal symbols everywhere."""
    if name[:1].isupper():
        return sympy.Symbol(name, integer=True, positive=True)
    return sympy.Symbol(name, integer=True, nonnegative=True)


def normalize(dim: Any) -> Dim:
    """An int or bool where the expression is constant, else the expression multiplied out.

    So equal sums become equal, also inside a condition. Raises TypeError on what is neither an integer nor an
    expression.
    """
    if isinstance(dim, sympy.Basic):
        return _multiplied_out(dim)
    return operator.index(dim)


@lru_cache(maxsize=4096)
def _multiplied_out(expr: Any) -> Dim:
    if isinstance(expr, BooleanAtom):
        return bool(expr)
    if is_condition(expr):
        again = expr.func(*map(_multiplied_out, expr.args))
        return again if again == expr else _multiplied_out(again)
    if expr.has(sympy.Min, sympy.Max):  # sympy leaves parts of these unevaluated: max(q, min(1, 2))
        expr = _rebuilt(expr)
    if expr.is_Integer:
        return int(expr)
    if expr.is_Symbol or not isinstance(expr, sympy.Expr):
        return expr
    found: Any = sympy.expand(expr)
    return int(found) if found.is_Integer else found


def _rebuilt(expr: Any) -> Any:
    """The expression made again from its leaves, until that changes nothing."""
    again = expr.func(*map(_rebuilt, expr.args)) if expr.args else expr
    return again if again == expr else _rebuilt(again)


def is_condition(e: Any) -> bool:
    """Whether an expression is true or false. A symbol is a size or position here; for sympy it is both."""
    return isinstance(e, Boolean) and not isinstance(e, sympy.Symbol)


def product(dims: tuple[Dim, ...]) -> Dim:
    """The number of elements of a shape."""
    constant, symbolic = 1, cast(Any, sympy.Integer(1))
    for dim in dims:
        if isinstance(dim, int):
            constant *= dim
        else:
            symbolic = symbolic * dim
    return constant if symbolic == 1 else normalize(constant * symbolic)


def free_names(dim: Any) -> set[str]:
    """Names of the symbols that occur in a dim or expression."""
    if isinstance(dim, sympy.Basic):
        return {str(s.name) for s in cast("set[Any]", dim.free_symbols)}
    return set()


def evaluate(dim: Any, values: Mapping[str, int]) -> int:
    """The value of a dim under a binding of its symbols.

    Raises KeyError with the symbol's name if one is not bound, ZeroDivisionError on a division by zero.
    """
    if isinstance(dim, int):
        return dim
    result = dim.xreplace({symbol(n): sympy.Integer(values[n]) for n in free_names(dim)})
    return int(result)


def upper_bound(dim: Any, bounds: Mapping[str, Bounds]) -> int | None:
    """The largest value that interval arithmetic gives for a dim; None if it has no upper bound.

    Exact where each symbol occurs once, else never too small. Raises KeyError with the name of a symbol that
    has no bounds.
    """
    high = _interval(dim, bounds)[1]
    return None if high == math.inf else int(high)


_Number = int | float  # a float only where it is infinite
_Interval = tuple[_Number, _Number]


def _interval(e: Any, bounds: Mapping[str, Bounds]) -> _Interval:
    """(lowest, highest) value of an expression. Raises ValueError on a part that is not arithmetic."""
    if isinstance(e, int | sympy.Integer):
        return int(e), int(e)
    if isinstance(e, sympy.Symbol):
        low, high = bounds[str(cast(Any, e).name)]
        return low, math.inf if high is None else high
    if isinstance(e, sympy.Pow) and isinstance(e.args[1], sympy.Integer) and e.args[1] > 0:
        parts = [_interval(e.args[0], bounds)] * int(cast(Any, e.args[1]))
        return _fold(parts, _corners(_times))
    parts = [_interval(a, bounds) for a in cast("tuple[Any, ...]", e.args)]
    for kind, combine in _COMBINE.items():
        if isinstance(e, kind):
            return _fold(parts, combine)
    raise ValueError(f"{e} is not a size")


def _fold(parts: list[_Interval], combine: Callable[[_Interval, _Interval], _Interval]) -> _Interval:
    result = parts[0]
    for part in parts[1:]:
        result = combine(result, part)
    return result


def _corners(fn: Callable[[Any, Any], Any]) -> Callable[[_Interval, _Interval], _Interval]:
    """The interval of a function that is monotone in each argument: its extremes are at the corners."""

    def combine(a: _Interval, b: _Interval) -> _Interval:
        found: list[_Number] = [fn(x, y) for x in a for y in b]
        return min(found), max(found)

    return combine


def _times(a: _Number, b: _Number) -> _Number:
    return 0 if 0 in (a, b) else a * b


def _floor_div(a: _Number, b: _Number) -> _Number:
    if b in (math.inf, -math.inf):
        return 0 if a >= 0 else -1
    return a if a in (math.inf, -math.inf) else a // max(b, 1)


def _ceil_div(a: _Number, b: _Number) -> _Number:
    return -_floor_div(-a, b)


def _mod(a: _Interval, b: _Interval) -> _Interval:
    return a if 0 <= a[0] and a[1] < b[0] else (0, b[1] - 1)


_COMBINE: dict[Any, Callable[[_Interval, _Interval], _Interval]] = {
    sympy.Add: lambda a, b: (a[0] + b[0], a[1] + b[1]),
    sympy.Mul: _corners(_times),
    FloorDiv: _corners(_floor_div),
    CeilDiv: _corners(_ceil_div),
    sympy.Mod: _mod,
    sympy.Min: lambda a, b: (min(a[0], b[0]), min(a[1], b[1])),
    sympy.Max: lambda a, b: (max(a[0], b[0]), max(a[1], b[1])),
}


def substitute(dim: Any, values: Mapping[str, Any]) -> Any:
    """A dim or expression with symbols replaced by other expressions; anything else is returned as it is."""
    if not isinstance(dim, sympy.Basic):
        return dim
    return cast(Any, dim).xreplace({symbol(n): values[n] for n in free_names(dim) if n in values})
