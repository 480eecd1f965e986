"""Canonical form of products with weights: `linear`, with its bias, on the shape that its neighbours have."""

from __future__ import annotations

from ir.graph import Op
from ir.rewrite import Miss, Replacement, Rule, View
from passes.match import attribute, is_constant, operand, orders, shape, without_leading_ones


def _matmul_with_weight(op: Op, view: View) -> Replacement | Miss:
    """x @ w [1..,K,N] -> linear with w transposed, which is a weight op."""
    x, w = op.args
    sizes = shape(w)
    one_matrix = all(d == 1 for d in sizes[:-2]) and len(sizes) <= len(shape(x))
    if not one_matrix or not is_constant(view, w) or is_constant(view, x):
        return None
    matrix = w if len(sizes) == 2 else view.op("reshape", w, shape=sizes[-2:])
    return view.op("linear", x, view.op("transpose", matrix, perm=(1, 0)))


def add_bias(op: Op, view: View) -> Replacement | Miss:
    """linear + constant [N] -> the linear's bias."""
    for y, bias in orders(op):
        linear = view.made_by(y, "linear")
        if linear is None or not is_constant(view, bias):
            continue
        reason = _no_bias(linear, view, op)
        if reason:
            return Miss("add bias", op, reason)
        width = shape(linear.out)[-1:]
        if without_leading_ones(shape(bias)) not in (width, without_leading_ones(width)):
            return Miss("add bias", op, f"{list(shape(bias))} is not one number per output {list(width)}")
        row = bias if shape(bias) == width else view.op("reshape", bias, shape=width)
        return view.op("linear", linear.args[0], linear.args[1], row, **linear.attrs)
    return None


def _no_bias(linear: Op, view: View, op: Op) -> str:
    if view.num_uses(linear.out) != 1:
        return "the linear's result is used elsewhere too"
    if len(linear.args) > 2 or attribute(linear, "activation") != "none" or attribute(linear, "gated"):
        return "the linear has an epilogue already"
    return "" if linear.out.type == op.out.type else "the sum is wider than the linear's result"


def _reshaped(op: Op, view: View) -> Replacement | Miss:
    """linear on rows [S,K] flattened from and back to [1,S,K]: the linear itself works on [1,S,K]."""
    linear = view.made_by(op.args[0], "linear")
    if linear is None or operand(linear, 3) is not None:
        return None
    flat, out = shape(linear.out), shape(op.out)
    if len(flat) != 2 or len(out) < 3 or out[-1] != flat[-1] or without_leading_ones(out[:-1]) != flat[:-1]:
        return None
    if view.num_uses(linear.out) != 1:
        return Miss("unflatten linear", op, "the linear's result is used elsewhere too")
    x = linear.args[0]
    rows = view.op("reshape", x, shape=(*out[:-1], shape(x)[-1]))
    return view.op("linear", rows, *linear.args[1:], **linear.attrs)


RULES = (
    Rule("matmul with weight to linear", ("matmul",), _matmul_with_weight),
    Rule("add bias", ("add",), add_bias),
    Rule("unflatten linear", ("reshape",), _reshaped),
)
