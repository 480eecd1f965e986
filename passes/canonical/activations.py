"""Activations that models write out in arithmetic become one op."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ir.graph import Arg, Op, Value
from ir.rewrite import Miss, Replacement, Rule, View
from passes.canonical.polynomial import close, polynomial
from passes.match import attribute, is_float, literal, orders

_GELU_INNER = {1: 1 / math.sqrt(2)}  # erf(x / sqrt 2)
_GELU_TANH_INNER = {1: math.sqrt(2 / math.pi), 3: 0.044715 * math.sqrt(2 / math.pi)}
_HALF = {1: 0.5}


def _silu(op: Op, view: View) -> Replacement | Miss:
    """x * sigmoid(x)"""
    for x, gate in orders(op):
        sigmoid = view.made_by(gate, "sigmoid")
        if sigmoid is not None and sigmoid.args[0] == x:
            return view.op("silu", x)
    return None


def _logistic(op: Op, view: View) -> Replacement | Miss:
    """1 / (1 + exp(-x)) is sigmoid(x); x / (1 + exp(-x)) is silu(x)."""
    total = view.made_by(op.args[1], "add")
    power = view.made_by(total.args[0], "exp") if total is not None else None
    inner = view.made_by(power.args[0], "neg") if power is not None else None
    if total is None or inner is None or literal(total.args[1]) != 1.0:
        return None
    if literal(op.args[0]) == 1.0:
        return view.op("sigmoid", inner.args[0])
    return view.op("silu", inner.args[0]) if op.args[0] == inner.args[0] else None


def _relu(op: Op, view: View) -> Replacement | Miss:
    x = op.args[0]
    if op.kind == "clamp":
        low, high = attribute(op, "low"), attribute(op, "high")
        is_relu = low is not None and float(low) == 0.0 and high is None
    else:
        is_relu = literal(op.args[1]) == 0.0
    return view.op("relu", x) if is_relu and is_float(x) else None


def _gelu(op: Op, view: View) -> Replacement | Miss:
    """0.5 * x * (1 + erf(x / sqrt 2)) or with tanh(sqrt(2/pi) * (x + 0.044715 x^3)), factors in any order."""
    for factors, gate in _gates(op, view):
        curve = view.made_by(gate.args[0], "erf", "tanh")
        if curve is None or literal(gate.args[1]) != 1.0:
            continue
        inner = _GELU_INNER if curve.kind == "erf" else _GELU_TANH_INNER
        x = _variable(curve.args[0], inner, view)
        if x is None:
            return Miss("name gelu", op, f"{curve.kind} is not taken of what gelu takes it of")
        if not _is_half(factors, x, view):
            return Miss("name gelu", op, f"1 + {curve.kind} is not multiplied by x / 2 of the same x")
        return view.op("gelu" if curve.kind == "erf" else "gelu_tanh", x)
    return None


def _gates(op: Op, view: View) -> Iterator[tuple[list[Arg], Op]]:
    """Each way to read a product, up to three factors deep, as (other factors, a factor that is a sum)."""
    for a, b in orders(op):
        gate = view.made_by(a, "add")
        if gate is not None:
            yield [b], gate
        product = view.made_by(a, "mul")
        for c, d in orders(product) if product is not None else ():
            gate = view.made_by(c, "add")
            if gate is not None:
                yield [b, d], gate


def _variable(inner: Arg, expected: dict[int, float], view: View) -> Value | None:
    """The value in which an operand is the expected polynomial."""
    for candidate in _values_below(inner, view):
        if close(polynomial(view, inner, candidate), expected):
            return candidate
    return None


def _values_below(arg: Arg, view: View, depth: int = 5) -> Iterator[Value]:
    if isinstance(arg, Value):
        yield arg
        op = view.made_by(arg, "add", "mul", "div", "pow")
        for inner in op.args if op is not None and depth else ():
            yield from _values_below(inner, view, depth - 1)


def _is_half(factors: list[Arg], x: Value, view: View) -> bool:
    parts = [polynomial(view, f, x) for f in factors]
    if len(parts) == 1:
        return close(parts[0], _HALF)
    a, b = parts
    if a is None or b is None:
        return False
    product = {p + q: c * d for p, c in a.items() for q, d in b.items()}
    return len(a) == len(b) == 1 and close(product, _HALF)


RULES = (
    Rule("name silu", ("mul",), _silu),
    Rule("name sigmoid", ("div",), _logistic),
    Rule("name relu", ("maximum", "clamp"), _relu),
    Rule("name gelu", ("mul",), _gelu),
)
