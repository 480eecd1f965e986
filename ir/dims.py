"""Symbolic sizes: integers or sympy expressions over named symbols.

An upper-case name (`T`, `M0`) is a size: a positive integer whose bounds the graph keeps. A lower-case name (`q`, `k`)
is a position: a non-negative integer, used in attention-mask predicates. Division is `FloorDiv`/`CeilDiv`, because
sympy's floor((T+15)/16) prints as floating point and does not equal ceiling(T/16).

Text is read by `ir.text`'s own grammar, never by sympify, which runs code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import sympy
from sympy.logic.boolalg import Boolean

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
    """An int where the expression is a constant, else the expression."""
    if isinstance(dim, int):
        return dim
    return int(dim) if dim.is_Integer else dim


def product(dims: tuple[Dim, ...]) -> Dim:
    """The number of elements of a shape."""
    total: Any = sympy.Integer(1)
    for dim in dims:
        total = total * dim
    return normalize(total)


def free_names(dim: Any) -> set[str]:
    """Names of the symbols that occur in a dim or expression."""
    if isinstance(dim, sympy.Basic):
        return {str(cast(Any, s).name) for s in dim.free_symbols}
    return set()


def evaluate(dim: Any, values: Mapping[str, int]) -> int:
    """The value of a dim under a binding of its symbols.

    Raises KeyError with the symbol's name if one is not bound.
    """
    if isinstance(dim, int):
        return dim
    result = dim.xreplace({symbol(n): sympy.Integer(values[n]) for n in free_names(dim)})
    return int(result)


def upper_bound(dim: Any, bounds: Mapping[str, Bounds]) -> int | None:
    """The largest value of a dim that grows with each of its symbols; None if a symbol has no upper bound."""
    limits = {name: bounds[name][1] for name in free_names(dim)}
    if any(limit is None for limit in limits.values()):
        return None
    return evaluate(dim, cast(dict[str, int], limits))
