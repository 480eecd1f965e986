"""Attention-mask predicates: which key positions `k` a query position `q` sees, as boolean expressions.

`evaluate_grid` runs one with numpy; `CAUSAL` and `conjuncts` are what passes and code generators ask about.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, cast

import numpy as np
import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Boolean, BooleanAtom, Not, Or

from ir.dims import CeilDiv, FloorDiv, Table, symbol

Grid = np.ndarray[Any, np.dtype[Any]]

QUERY = symbol("q")
KEY = symbol("k")
CAUSAL: Boolean = cast(Boolean, KEY <= QUERY)

_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "<=": np.less_equal, "<": np.less, ">=": np.greater_equal, ">": np.greater,
    "==": np.equal, "!=": np.not_equal,
}  # fmt: skip


def window(size: int) -> Boolean:
    """Keys at most size - 1 before the query."""
    return cast(Boolean, (QUERY - KEY) < size)


def conjuncts(predicate: Any) -> tuple[Any, ...]:
    """The terms that must all hold."""
    return predicate.args if isinstance(predicate, And) else (predicate,)


def is_causal(predicate: Any) -> bool:
    """Whether "not after the query" is one of the terms, whatever way round it is written."""
    return any(_limit(term, KEY - QUERY) == 1 for term in conjuncts(predicate))


def window_of(predicate: Any) -> int | None:
    """W if one of the terms is q - k < W or an equal form of it; the smallest if several are."""
    sizes = [w for w in (_limit(term, QUERY - KEY) for term in conjuncts(predicate)) if w is not None]
    return min(sizes, default=None)


def _limit(term: Any, difference: Any) -> int | None:
    """c if the term says exactly `difference < c`."""
    if not isinstance(term, Relational):
        return None
    form = {"<": (0, 1), "<=": (1, 1), ">": (0, -1), ">=": (1, -1)}.get(str(term.rel_op))
    if form is None:
        return None
    slack, sign = form
    bound = sympy.expand(sign * (term.rhs - term.lhs) + difference + slack)
    return int(bound) if isinstance(bound, sympy.Integer) else None


def evaluate_grid(expr: Any, q: Any, k: Any, tables: Sequence[Grid] = ()) -> Any:
    """The value of a predicate or integer expression for numpy arrays (or ints) q, k that broadcast together.

    Raises ValueError on an expression that is not a mask predicate, IndexError where it leaves a table.
    """

    def walk(e: Any) -> Any:
        return evaluate_grid(e, q, k, tables)

    if isinstance(expr, bool) or expr in (sympy.true, sympy.false):
        return np.broadcast_to(np.bool_(bool(expr)), np.broadcast_shapes(np.shape(q), np.shape(k)))
    if isinstance(expr, (int, sympy.Integer)):
        return int(expr)
    if isinstance(expr, sympy.Symbol):
        if expr not in (QUERY, KEY):
            raise ValueError(f"mask predicate uses {expr}, which is neither q nor k")
        return q if expr == QUERY else k
    args: list[Any] = list(expr.args)
    if isinstance(expr, Table):
        return _entry(tables[int(args[0])], walk(args[1]), walk(args[2]))
    if isinstance(expr, Relational):
        return _COMPARE[str(expr.rel_op)](walk(args[0]), walk(args[1]))
    for kind, fn in _NUMPY.items():
        if isinstance(expr, kind):
            return reduce(fn, [walk(a) for a in args])
    if isinstance(expr, Not):
        return np.logical_not(walk(args[0]))
    raise ValueError(f"mask predicate holds {expr}, which is not one of its operators")


def _entry(table: Grid, row: Any, column: Any) -> Any:
    if np.size(row) and np.size(column) and min(np.min(row), np.min(column)) < 0:
        raise IndexError("a mask table is read at a negative position")
    return table[row, column]


def why_not(predicate: Any, num_tables: int) -> str | None:
    """Why something is not a mask predicate over q, k and so many tables; None if it is one."""
    if isinstance(predicate, bool | BooleanAtom):
        return None
    if isinstance(predicate, And | Or | Not):
        reasons = (why_not(a, num_tables) for a in predicate.args)
    elif isinstance(predicate, Relational):
        reasons = (_why_not_integer(a) for a in predicate.args)
    elif isinstance(predicate, Table):
        index = predicate.args[0]
        if not (index.is_Integer and 0 <= int(index) < num_tables):
            return f"{predicate} reads a table that is not given; there are {num_tables}"
        reasons = (_why_not_integer(a) for a in predicate.args[1:])
    else:
        return f"{predicate!r} is not a mask predicate, a boolean expression over the positions q and k"
    return next((r for r in reasons if r is not None), None)


def _why_not_integer(expr: Any) -> str | None:
    if isinstance(expr, sympy.Integer) or expr in (QUERY, KEY):
        return None
    if isinstance(expr, sympy.Pow) and isinstance(expr.exp, sympy.Integer) and expr.exp > 1:
        return _why_not_integer(expr.base)
    if not isinstance(expr, _ARITHMETIC):
        return f"{expr} is not an integer expression over q and k"
    return next((r for r in map(_why_not_integer, expr.args) if r is not None), None)


_ARITHMETIC = (sympy.Add, sympy.Mul, FloorDiv, CeilDiv, sympy.Mod, sympy.Min, sympy.Max)

_NUMPY: dict[Any, Callable[[Any, Any], Any]] = {
    And: np.logical_and,
    Or: np.logical_or,
    sympy.Add: np.add,
    sympy.Mul: np.multiply,
    sympy.Pow: np.power,
    FloorDiv: np.floor_divide,
    CeilDiv: lambda a, b: -(-a // b),
    sympy.Mod: np.mod,
    sympy.Min: np.minimum,
    sympy.Max: np.maximum,
}
