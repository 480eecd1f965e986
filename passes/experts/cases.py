"""What a value of all experts is for the experts that a token chose, and for those that it did not.

The indices of a `topk` differ, so an expert is chosen by one slot of a token or by none. So a comparison of
the slots with an expert's number is true for one slot or for none, what is picked by it is that slot's, and
the rest follows op by op (passes/experts/rules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ir.graph import Arg, Op, Scalar, Value
from ir.ops import OPS, RefCall
from ir.rewrite import View
from ir.types import DType
from passes.experts.layout import Atom, Layout
from passes.match import attribute, dtype, last_axis, shape

_MOVES = ("reshape", "cast", "expand", "transpose")
_EXACT = 32  # bits of a type that tells all experts apart


@dataclass(frozen=True)
class Shared:
    """The same for all experts. A literal has no layout."""

    arg: Arg
    layout: Layout = ()


@dataclass(frozen=True)
class Number:
    """The expert's own."""


@dataclass(frozen=True)
class Diagonal:
    """Of an expert and a slot: `on` where the slot chose the expert, `off` where it did not."""

    on: Shared
    off: Scalar


@dataclass(frozen=True)
class Routed:
    """slot: [tokens, k, features], any of them 1 where it is the same for all, or a literal. none: for
    experts that are not chosen; None: not known.
    """

    slot: Value | Scalar
    features: tuple[Atom, ...]
    none: Scalar | None


Case = Shared | Number | Diagonal | Routed


def literal_of(case: Case) -> Scalar | None:
    """The number that it is for all experts, if it is one."""
    return case.arg if isinstance(case, Shared) and isinstance(case.arg, Scalar) else None


def none_of(case: Case) -> Scalar | None:
    """For an expert that is not chosen, as far as that is a number."""
    return case.none if isinstance(case, Routed) else literal_of(case)


def is_zero(number: Scalar | None) -> bool:
    return number is not None and number.value == 0


def moved(view: View, arg: Arg) -> Op | None:
    """The op that gives the same indices in other places, or as other numbers that tell them apart."""
    op = view.made_by(arg, *_MOVES)
    kind = dtype(arg)
    return op if op is not None and kind is not None and (op.kind != "cast" or kind.bits >= _EXACT) else None


def chosen_by(view: View, arg: Arg) -> Value | None:
    """The indices of a topk that an operand is, or one slot of them, seen through moves and casts."""
    while (move := moved(view, arg)) is not None:
        arg = move.args[0]
    op = view.producer(arg)
    if not isinstance(arg, Value) or op is None:
        return None
    if op.kind == "slice" and attribute(op, "axis") == last_axis(arg) and shape(arg)[-1] == 1:
        choice = view.made_by(op.args[0], "topk")
        return arg if choice is not None and op.args[0] == choice.outs[1] else None
    return arg if op.kind == "topk" and arg == op.outs[1] else None


def scores_of(view: View, indices: Value) -> Arg:
    """What a choice is made among: [.., E]."""
    op = view.producer(indices)
    if op is not None and op.kind == "slice":
        op = view.producer(op.args[0])
    assert op is not None and op.kind == "topk"
    return op.args[0]


def cast_literal(number: Scalar, kind: DType) -> Scalar:
    if kind is DType.BOOL:
        return Scalar(bool(number.value))
    return Scalar(float(number.value)) if kind.is_float else Scalar(int(number.value))


def evaluated(op: Op, args: Sequence[Scalar]) -> Scalar:
    """An op of literals."""
    if op.kind == "cast":
        return cast_literal(args[0], DType(attribute(op, "dtype")))
    values = tuple(np.asarray(a.value) for a in args)
    with np.errstate(all="ignore"):
        call = RefCall(op.kind, values, OPS[op.kind].complete(op.attrs), np.float64)
        return Scalar(np.asarray(OPS[op.kind].reference(call)[0]).item())
