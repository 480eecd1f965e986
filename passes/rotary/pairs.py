"""Two arrays of P elements put into one of 2P: one after the other, or in turn."""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Arg, Op
from ir.rewrite import View
from passes.match import Lanes, attribute, last_axis, shape


@dataclass(frozen=True)
class Pair:
    """first and second, side by side (half style) or element by element (interleaved)."""

    first: Arg
    second: Arg
    interleaved: bool


def pair_of(view: View, arg: Arg, op: Op | None = None) -> Pair | None:
    """How an operand was put together; `op` is its producer, where that is the op being rewritten."""
    op = op or view.made_by(arg, "concat", "reshape")
    if op is None:
        return None
    if op.kind == "concat":
        return _beside(op)
    stacked = view.made_by(op.args[0], "concat")
    pair = _beside(stacked) if stacked is not None else None
    if pair is None or not _flattens(op):
        return None
    return Pair(_unpaired(view, pair.first), _unpaired(view, pair.second), True)


def _beside(op: Op) -> Pair | None:
    if len(op.args) != 2 or attribute(op, "axis") != last_axis(op.out):
        return None
    first, second = op.args
    return Pair(first, second, False) if shape(first) == shape(second) else None


def _flattens(op: Op) -> bool:
    """[..,P,2] to [..,2P]"""
    inner, outer = shape(op.args[0]), shape(op.out)
    return inner[-1:] == (2,) and inner[:-2] == outer[:-1]


def _unpaired(view: View, arg: Arg) -> Arg:
    """[..,P] of what was reshaped to [..,P,1]; else the operand [..,P,1]."""
    op = view.made_by(arg, "reshape")
    return op.args[0] if op is not None and shape(op.out) == (*shape(op.args[0]), 1) else arg


def halves_of(whole: Lanes, a: Lanes, b: Lanes, interleaved: bool) -> bool:
    """Whether a and b are the halves of `whole`, or its elements at even and at odd places."""
    values = {(x.base, x.flat) for x in (whole, a, b)}
    if len(values) != 1 or whole.step != 1 or 2 * a.count != whole.count:
        return False
    step = 2 if interleaved else 1
    between = 1 if interleaved else a.count
    return (a.start, a.step, a.count) == (whole.start, step, b.count) and (b.start, b.step) == (
        whole.start + between,
        step,
    )
