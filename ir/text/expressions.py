"""Printing sizes and predicates. `ir.text.grammar` reads back exactly what is printed here."""

from __future__ import annotations

from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Not, Or

from ir.dims import CeilDiv, FloorDiv, Table

CALLS: dict[str, Any] = {
    "ceildiv": CeilDiv, "mod": sympy.Mod, "min": sympy.Min, "max": sympy.Max, "Table": Table,
}  # fmt: skip
ARITY: dict[str, tuple[int, int | None]] = {  # the fewest and the most arguments
    "ceildiv": (2, 2), "mod": (2, 2), "min": (2, None), "max": (2, None), "Table": (3, 3),
}  # fmt: skip


def expression(e: Any) -> str:
    """The text of an int or expression."""
    if isinstance(e, int | sympy.Integer | sympy.Symbol):
        return str(e)
    if e in (sympy.true, sympy.false):
        return "true" if e == sympy.true else "false"
    if isinstance(e, And | Or):
        sign = " & " if isinstance(e, And) else " | "
        return sign.join(sorted(f"({expression(a)})" for a in e.args))
    if isinstance(e, Not):
        return f"~({expression(e.args[0])})"
    if isinstance(e, Relational):
        return f"{_operand(e.lhs)} {e.rel_op} {_operand(e.rhs)}"
    return _arithmetic(e)


def _arithmetic(e: Any) -> str:
    if isinstance(e, sympy.Add):
        text = ""
        for term in sorted(e.as_ordered_terms(), key=_is_negative):
            sign, shown = ("-", -term) if _is_negative(term) else ("+", term)
            text += f" {sign} {_operand(shown)}" if text else ("-" if sign == "-" else "") + _operand(shown)
        return text
    if isinstance(e, sympy.Mul):
        if _is_negative(e):
            rest = -e
            return f"-{expression(rest) if isinstance(rest, sympy.Mul) else _factor(rest)}"
        return "*".join(_factor(f) for f in e.as_ordered_factors())
    if isinstance(e, sympy.Pow) and isinstance(e.exp, sympy.Integer) and e.exp > 1:
        return "*".join([_factor(e.base)] * int(e.exp))
    if isinstance(e, FloorDiv):
        return f"{_factor(e.args[0])}//{_factor(e.args[1])}"
    for name, kind in CALLS.items():
        if isinstance(e, kind):
            return f"{name}({', '.join(expression(a) for a in e.args)})"
    raise ValueError(f"{e!r} has no text form")


def _is_negative(term: Any) -> bool:
    return bool(term.as_coeff_Mul()[0] < 0)


def _operand(e: Any) -> str:
    """e as an operand of + or of a comparison."""
    return (
        f"({expression(e)})"
        if isinstance(e, sympy.Add | FloorDiv | Relational | And | Or | Not)
        else expression(e)
    )


def _factor(e: Any) -> str:
    """e as an operand of * or //."""
    simple = isinstance(e, int | sympy.Symbol) or isinstance(e, tuple(CALLS.values()))
    return expression(e) if simple or (isinstance(e, sympy.Integer) and e >= 0) else f"({expression(e)})"
