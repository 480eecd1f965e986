"""torch's symbolic sizes -> the IR's."""

from __future__ import annotations

from functools import reduce
from typing import Any

import sympy

from compiler.importers.refused import ImportRefused
from ir.dims import Dim, FloorDiv, normalize, symbol

_ARITHMETIC = (sympy.Add, sympy.Mul)
_DIVISIONS = frozenset({"FloorDiv", "CleanDiv"})


def to_dim(size: Any, context: int) -> Dim:
    """An int, or an expression over S, 1 <= S <= context. Every backed symbol of an export is the one length.

    Raises ImportRefused on a size that depends on data, and on an expression that the IR's sizes do not have.
    """
    if isinstance(size, int):
        return size
    found = _convert(size.node.expr if hasattr(size, "node") else size, context)
    return normalize(found if found.has(FloorDiv) else sympy.expand(found))


def _convert(expr: Any, context: int) -> Any:
    if expr.is_Symbol and str(expr).startswith("s"):
        return symbol("S")
    if expr.is_Symbol:
        raise ImportRefused("a size depends on the values of a tensor, and not on the sequence length alone")
    if expr.is_Integer:
        return sympy.Integer(int(expr))
    args = [_convert(a, context) for a in expr.args]
    kind = type(expr).__name__
    if kind in _DIVISIONS:
        exact = sympy.cancel(args[0] / args[1])
        return exact if exact.is_polynomial() and exact.is_integer else FloorDiv(*args)
    if kind in ("Min", "Max"):
        return reduce(lambda a, b: _extreme(a, b, context, kind), args)
    if expr.is_Pow and args[1].is_Integer and int(args[1]) > 0:
        return args[0] ** args[1]
    if not isinstance(expr, _ARITHMETIC):
        raise ImportRefused(f"a size is {expr}, which is not made of +, * and // over the sequence length")
    return expr.func(*args)


def _extreme(a: Any, b: Any, context: int, kind: str) -> Any:
    """The one of two sizes that is the smaller (larger) at every length: a difference linear in S has its
    extremes at 1 and at the context."""
    difference = sympy.expand(a - b)
    length = symbol("S")
    ends = [difference.subs(length, n) for n in (1, context)]
    is_linear = difference.is_polynomial(length) and sympy.Poly(difference, length).degree() <= 1
    if is_linear and all(e.is_Integer for e in ends):
        if all(e >= 0 for e in ends):
            return a if kind == "Max" else b
        if all(e <= 0 for e in ends):
            return b if kind == "Max" else a
    raise ImportRefused(f"a size is the {kind.lower()}imum of {a} and {b}, which switches at some length")
