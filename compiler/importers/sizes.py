"""torch's symbolic sizes -> the IR's."""

from __future__ import annotations

from typing import Any

import sympy

from compiler.importers.refused import ImportRefused
from ir.dims import Dim, FloorDiv, normalize, symbol

_ARITHMETIC = (sympy.Add, sympy.Mul, sympy.Integer, sympy.Symbol, FloorDiv)
_DIVISIONS = frozenset({"FloorDiv", "CleanDiv", "IntTrueDiv"})


def to_dim(size: Any) -> Dim:
    """An int, or an expression over S. Every symbol of an export is the one sequence length.

    Raises ImportRefused on an expression that the IR's sizes do not have (a Min, a Max, a remainder).
    """
    if isinstance(size, int):
        return size
    found = _convert(size.node.expr if hasattr(size, "node") else size)
    return normalize(sympy.expand(found) if not found.has(FloorDiv) else found)


def _convert(expr: Any) -> Any:
    if expr.is_Symbol:
        return symbol("S")
    if expr.is_Integer:
        return sympy.Integer(int(expr))
    args = [_convert(a) for a in expr.args]
    if type(expr).__name__ in _DIVISIONS:
        return FloorDiv(*args)
    if expr.is_Pow and args[1].is_Integer and int(args[1]) > 0:
        return args[0] ** args[1]
    if not isinstance(expr, _ARITHMETIC):
        raise ImportRefused(
            f"a size is {expr}, which is not made of +, * and // over the sequence length alone"
        )
    return expr.func(*args)
