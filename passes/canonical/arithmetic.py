"""Canonical form of arithmetic: literals on the right, no-ops gone, powers and roots by their names."""

from __future__ import annotations

import math

from ir.graph import Arg, Op, Scalar
from ir.rewrite import Miss, Replacement, Rule, View
from passes.match import BROADCASTING, COMMUTATIVE, attribute, dtype, is_float, keeps_type, literal, tensor

_FLIPPED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}
_SWAPS = {kind: kind for kind in sorted(COMMUTATIVE)} | _FLIPPED
_NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0, "floordiv": 1.0}
_SMALLEST_NORMAL = 2.0**-126  # of f32


def _literal_right(op: Op, view: View) -> Replacement | Miss:
    x, y = op.args
    if not isinstance(x, Scalar) or isinstance(y, Scalar):
        return None
    return view.op(_SWAPS[op.kind], y, x)


def _constant_operand(op: Op, view: View) -> Replacement | Miss:
    """A `full`, or the size of a fixed axis, becomes a literal, where the result keeps its shape."""
    for index, arg in enumerate(op.args):
        value = _constant(arg, view)
        if value is None:
            continue
        args: list[Arg] = [*op.args[:index], Scalar(value), *op.args[index + 1 :]]
        if keeps_type(op, args):
            return view.op(op.kind, *args, **op.attrs)
    return None


def _constant(arg: Arg, view: View) -> bool | int | float | None:
    op = view.made_by(arg, "full", "dim")
    if op is None:
        return None
    if op.kind == "full":
        return op.attr("value")
    size = attribute(op, "size")
    if not isinstance(size, int):
        return None
    return float(size) if is_float(op.out) else size


def _drop_neutral(op: Op, view: View) -> Replacement | Miss:
    x, y = op.args
    if literal(y) != _NEUTRAL[op.kind] or tensor(x) != op.out.type:
        return None
    return None if op.kind == "floordiv" and is_float(x) else x


def _sub_literal(op: Op, view: View) -> Replacement | Miss:
    x, y = op.args
    return view.op("add", x, Scalar(-y.value)) if isinstance(y, Scalar) else None


def _negated(op: Op, view: View) -> Replacement | Miss:
    """x + (-y) and x - (-y), which round as x - y and x + y do."""
    x, y = op.args
    inner = view.made_by(y, "neg")
    if inner is None:
        return None
    return view.op("sub" if op.kind == "add" else "add", x, inner.args[0])


def _div_by_power_of_two(op: Op, view: View) -> Replacement | Miss:
    x, value = op.args[0], literal(op.args[1])
    if value is None or value == 0 or not math.isfinite(value) or not is_float(x):
        return None
    exact = math.frexp(value)[0] in (0.5, -0.5) and _SMALLEST_NORMAL <= abs(1 / value) < 1 / _SMALLEST_NORMAL
    return view.op("mul", x, Scalar(1 / value)) if exact else None


def _power(op: Op, view: View) -> Replacement | Miss:
    x, exponent = op.args[0], literal(op.args[1])
    if exponent == 2.0 and dtype(x) is not None:
        return view.op("mul", x, x)
    if exponent in (0.5, -0.5) and is_float(x):
        return view.op("sqrt" if exponent == 0.5 else "rsqrt", x)
    return None


def _reciprocal_root(op: Op, view: View) -> Replacement | Miss:
    """1 / sqrt(x)"""
    root = view.made_by(op.args[1], "sqrt")
    return view.op("rsqrt", root.args[0]) if root is not None and literal(op.args[0]) == 1.0 else None


RULES = (
    Rule("constant to literal", BROADCASTING, _constant_operand),
    Rule("literal to the right", tuple(_SWAPS), _literal_right),
    Rule("drop neutral operand", tuple(_NEUTRAL), _drop_neutral),
    Rule("sub literal to add", ("sub",), _sub_literal),
    Rule("fold neg into add", ("add", "sub"), _negated),
    Rule("div by power of two to mul", ("div",), _div_by_power_of_two),
    Rule("name powers", ("pow",), _power),
    Rule("name rsqrt", ("div",), _reciprocal_root),
)
