"""Reading arithmetic as a polynomial in one value, so that every way of writing one formula is recognised."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ir.graph import Arg, Value
from ir.rewrite import View
from passes.match import literal

Polynomial = Mapping[int, float]  # power -> coefficient

_ARITHMETIC = ("add", "sub", "mul", "div", "pow", "neg")
_MAX_DEGREE = 4
TOLERANCE = 1e-6  # relative: constants may have been rounded to f32


def polynomial(view: View, arg: Arg, x: Value, depth: int = 8) -> Polynomial | None:
    """An operand's coefficients in x; None where it is made of anything else."""
    if arg == x:
        return {1: 1.0}
    value = literal(arg)
    if value is not None:
        return {0: value}
    op = view.made_by(arg, *_ARITHMETIC)
    if op is None or depth == 0:
        return None
    parts = [polynomial(view, a, x, depth - 1) for a in op.args]
    if op.kind == "pow":
        exponent = literal(op.args[1])
        return _power(parts[0], exponent) if parts[0] is not None and exponent is not None else None
    known = [p for p in parts if p is not None]
    return _combine(op.kind, known) if len(known) == len(parts) else None


def close(found: Polynomial | None, expected: Polynomial) -> bool:
    """Whether two polynomials are equal up to rounding of their coefficients."""
    if found is None:
        return False
    powers = {*found, *expected}
    return all(
        math.isclose(found.get(p, 0.0), expected.get(p, 0.0), rel_tol=TOLERANCE, abs_tol=1e-12)
        for p in powers
    )


def _combine(kind: str, parts: list[Polynomial]) -> Polynomial | None:
    if kind == "neg":
        return _scaled(parts[0], -1.0)
    a, b = parts
    if kind in ("add", "sub"):
        b = b if kind == "add" else _scaled(b, -1.0)
        return {p: a.get(p, 0.0) + b.get(p, 0.0) for p in {*a, *b}}
    if kind == "div":
        return _scaled(a, 1 / b[0]) if set(b) == {0} and b[0] else None
    return _product(a, b)


def _scaled(a: Polynomial, factor: float) -> Polynomial:
    return {p: c * factor for p, c in a.items()}


def _product(a: Polynomial, b: Polynomial) -> Polynomial | None:
    found: dict[int, float] = {}
    for p, c in a.items():
        for q, d in b.items():
            found[p + q] = found.get(p + q, 0.0) + c * d
    return found if max(found) <= _MAX_DEGREE else None


def _power(a: Polynomial, exponent: float) -> Polynomial | None:
    if exponent not in (1.0, 2.0, 3.0):
        return None
    found: Polynomial | None = a
    for _ in range(int(exponent) - 1):
        found = _product(found, a) if found is not None else None
    return found
