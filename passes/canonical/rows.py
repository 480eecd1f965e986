"""Canonical form of rows that tokens and their heads make together: the tokens an axis of their own.

What is done for each row of [n * S, C] is done for [S, n, C], so that the token axis stays whole. A model
writes reshape(-1, C) where it norms each head.
"""

from __future__ import annotations

from typing import Any

import sympy

from ir.dims import free_names, normalize, product, symbol
from ir.graph import Arg, Op, Scalar
from ir.rewrite import Miss, Replacement, Rule, View
from passes.match import POINTWISE, attribute, shape

S = symbol("S")
_NORMS = ("rms_norm", "layer_norm")
_REDUCTIONS = ("mean", "sum", "max")


def _split_rows(op: Op, view: View) -> Replacement | Miss:
    """An op on rows [.., n*S, ..] that a reshape made of [.., S, ..]: on [.., S, n, ..]."""
    found = _merged(op, view)
    if found is None:
        return None
    axis, count = found
    alone = op.kind in (*_NORMS, "linear")  # the first operand has rows, the others are the same for each
    args = [a if alone and i else _unmerged(a, op, axis, count, view) for i, a in enumerate(op.args)]
    if any(a is None and given is not None for a, given in zip(args, op.args, strict=True)):
        return None
    attrs = dict(op.attrs)
    if op.kind in _NORMS and axis >= len(shape(op.out)) - attribute(op, "rank"):
        return None
    if op.kind in _REDUCTIONS:
        axes = tuple(attribute(op, "axes"))
        if axis in axes:
            return None
        attrs["axes"] = tuple(a + (a > axis) for a in axes)
    return view.op("reshape", view.op(op.kind, *args, **attrs), shape=shape(op.out))


def _merged(op: Op, view: View) -> tuple[int, int] | None:
    """The axis that has n rows for each token, and n, by the first operand that a reshape made so."""
    for arg in op.args:
        made = view.made_by(arg, "reshape")
        if made is None or len(shape(arg)) != _rank(op):
            continue
        for axis, size in enumerate(shape(arg)):
            count = normalize(sympy.sympify(size) / S) if free_names(size) else None
            if isinstance(count, int) and count > 1 and _keeps_tokens(shape(made.args[0]), shape(arg)[:axis]):
                return axis, count
    return None


def _rank(op: Op) -> int:
    """Axes of the operands that have all of them."""
    return max(len(shape(a)) for a in op.args)


def _keeps_tokens(source: tuple[Any, ...], before: tuple[Any, ...]) -> bool:
    """Whether a shape has an axis S, after as many elements as those `before`."""
    return any(size == S and product(source[:i]) == product(before) for i, size in enumerate(source))


def _unmerged(arg: Arg, op: Op, axis: int, count: int, view: View) -> Arg:
    """An operand with the axis as two; None where it has that axis and no reshape made it."""
    sizes = shape(arg)
    at = axis - (_rank(op) - len(sizes))
    if isinstance(arg, Scalar | None) or at < 0:
        return arg
    two = (1, 1) if sizes[at] == 1 else (S, count)
    if sizes[at] != 1 and view.made_by(arg, "reshape") is None:
        return None
    return view.op("reshape", arg, shape=(*sizes[:at], *two, *sizes[at + 1 :]))


RULES = (Rule("tokens of rows", (*POINTWISE, *_NORMS, *_REDUCTIONS, "linear"), _split_rows),)
