"""Integers and truth values of an ONNX graph that are functions of where they stand.

Positions, counts of a mask of ones and the masks that exporters compute from them are tensors whose element
is an expression over its own index (`i0`, `i1`, ..) and the length S. Kept as such they need no ops: what an
exporter wrote in thirty (a difference of positions, a running sum, a gather) is one expression again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Not, Or

from ir.dims import Dim, FloorDiv, normalize, symbol, upper_bound
from ir.types import DType

ZERO = sympy.Integer(0)


class FormulaError(ValueError):
    """It has no expression."""


@dataclass(frozen=True)
class Formula:
    """dtype: I32 or BOOL. expr: of the element at (i0, i1, ..); axes of size 1 do not occur in it."""

    dtype: DType
    shape: tuple[Dim, ...]
    expr: Any

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def is_constant(self) -> bool:
        """Whether every element is the same."""
        return not any(axis(i) in self.expr.free_symbols for i in range(self.rank))

    def limits(self, context: int) -> tuple[int, int] | None:
        """The least and the greatest element at any length up to the context, where they are known."""
        bounds = {"S": (1, context)}
        inside: dict[str, tuple[int, int | None]] = {}
        for i, size in enumerate(self.shape):
            most = upper_bound(size, bounds)
            inside[f"i{i}"] = (0, None if most is None else most - 1)
        try:
            high = upper_bound(self.expr, {**bounds, **inside})
            low = upper_bound(sympy.expand(-self.expr), {**bounds, **inside})
        except ValueError:
            return None
        return None if high is None or low is None else (-low, high)


def axis(i: int) -> Any:
    """The index along axis i."""
    return symbol(f"i{i}")


def formula(dtype: DType, shape: Sequence[Dim], expr: Any) -> Formula:
    """Simplified, and without the index of an axis of size 1."""
    sizes = tuple(normalize(n) for n in shape)
    found = moved(sympy.sympify(expr), {axis(i): ZERO for i, n in enumerate(sizes) if n == 1})
    found = found if dtype is DType.BOOL else sympy.expand(found)
    return Formula(dtype, sizes, decided(found, sizes))


def moved(expr: Any, places: dict[Any, Any]) -> Any:
    """The expression at other indices."""
    used = {k: v for k, v in places.items() if k in expr.free_symbols and k != v}
    if not used:
        return expr
    apart = {k: sympy.Dummy(integer=True, nonnegative=True) for k in used}
    return expr.xreplace(apart).subs({apart[k]: v for k, v in used.items()}, simultaneous=True)


def broadcast(shapes: Sequence[tuple[Dim, ...]]) -> tuple[Dim, ...]:
    rank = max(map(len, shapes))
    found: list[Dim] = []
    for column in zip(*(((1,) * (rank - len(s)) + tuple(s)) for s in shapes), strict=True):
        sizes = {n for n in column if n != 1}
        if len(sizes) > 1:
            raise FormulaError(f"shapes {[list(s) for s in shapes]} do not broadcast")
        found.append(sizes.pop() if sizes else 1)
    return tuple(found)


def elementwise(dtype: DType, fn: Callable[..., Any], *operands: Formula) -> Formula:
    """fn of the elements at the same place. Raises FormulaError."""
    shape = broadcast([o.shape for o in operands])
    parts = [moved(o.expr, {axis(i): axis(i + len(shape) - o.rank) for i in range(o.rank)}) for o in operands]
    return formula(dtype, shape, fn(*parts))


def at(x: Formula, shape: Sequence[Dim], places: dict[int, Any]) -> Formula:
    """The tensor of a shape whose element is x's at `places`, by x's axes, over the new indices."""
    return formula(x.dtype, shape, moved(x.expr, {axis(i): place for i, place in places.items()}))


def decided(expr: Any, shape: Sequence[Dim]) -> Any:
    """Comparisons that hold, or fail, at every index and every length as true or false."""
    found = {r: _decision(r, shape) for r in expr.atoms(Relational)}
    return expr.xreplace({r: value for r, value in found.items() if value is not None})


def _decision(relation: Any, shape: Sequence[Dim]) -> Any:
    ends = extremes(sympy.expand(relation.lhs - relation.rhs), shape)
    if ends is None:
        return None
    low, high = ends
    below, above = high.is_negative, low.is_positive
    at_most, at_least = high.is_nonpositive, low.is_nonnegative
    tests = {
        sympy.Lt: (below, at_least),
        sympy.Le: (at_most, above),
        sympy.Gt: (above, at_most),
        sympy.Ge: (at_least, below),
        sympy.Ne: (below or above, low == high == 0),
        sympy.Eq: (low == high == 0, below or above),
    }
    holds, fails = tests.get(relation.func, (None, None))
    return sympy.true if holds else sympy.false if fails else None


def extremes(expr: Any, shape: Sequence[Dim]) -> tuple[Any, Any] | None:
    """The least and greatest value of an expression linear in the indices, with S - 1 as a symbol."""
    indices = [axis(i) for i in range(len(shape)) if axis(i) in expr.free_symbols]
    if indices and (not expr.is_polynomial(*indices) or sympy.Poly(expr, *indices).total_degree() > 1):
        return None
    low = high = expr
    for i in indices:
        last = shape[int(i.name[1:])] - 1
        up = expr.coeff(i)
        if not up.is_Integer:
            return None
        low, high = low.subs(i, 0 if up > 0 else last), high.subs(i, last if up > 0 else 0)
    shorter = symbol("S"), symbol("s") + 1
    return sympy.expand(low.subs(*shorter)), sympy.expand(high.subs(*shorter))


def quotient(a: Any, b: Any) -> Any:
    """a / b of integers, rounded towards zero as ONNX does it; of what is not negative."""
    a, b = sympy.sympify(a), sympy.sympify(b)
    if not (b.is_Integer and b > 0 and a.is_nonnegative):
        raise FormulaError(f"divides {a} by {b}")
    exact = sympy.expand(a / b)
    return exact if exact.is_integer else FloorDiv(a, b)


def choice(condition: Any, x: Any, y: Any) -> Any:
    if condition in (sympy.true, sympy.false):
        return x if condition == sympy.true else y
    if isinstance(x, sympy.logic.boolalg.Boolean) and isinstance(y, sympy.logic.boolalg.Boolean):
        return Or(And(condition, x), And(Not(condition), y))
    return sympy.Piecewise((x, condition), (y, True))


def _as_truth(x: Any) -> Any:
    return x if isinstance(x, sympy.logic.boolalg.Boolean) else sympy.Ne(x, 0)


SYMBOLIC: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: sympy.expand(a * b),
    "floordiv": quotient,
    "mod": lambda a, b: sympy.Mod(a, b),
    "neg": lambda a: -a,
    "abs": lambda a: sympy.Max(a, -a),
    "maximum": lambda a, b: sympy.Max(a, b),
    "minimum": lambda a, b: sympy.Min(a, b),
    "lt": lambda a, b: sympy.Lt(a, b),
    "le": lambda a, b: sympy.Le(a, b),
    "gt": lambda a, b: sympy.Gt(a, b),
    "ge": lambda a, b: sympy.Ge(a, b),
    "eq": lambda a, b: sympy.Eq(a, b),
    "ne": lambda a, b: sympy.Ne(a, b),
    "and": lambda a, b: And(a, b),
    "or": lambda a, b: Or(a, b),
    "not": lambda a: Not(a),
    "where": choice,
    "truth": _as_truth,
}
COMPARISONS = frozenset({"lt", "le", "gt", "ge", "eq", "ne", "and", "or", "not", "truth"})
