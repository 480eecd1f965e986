"""Fold into a linear what follows it element by element: bias, activation, gate times up, residual.

Rows stay independent: nothing folded here reads another row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

from ir.graph import Arg, Graph, Op, Value
from ir.rewrite import Miss, Replacement, Rule, View, rewrite
from passes.base import Pass, Result, result
from passes.canonical.linears import add_bias
from passes.linears import LINEARS, bias_of, residual_of
from passes.match import (
    ACTIVATION_KINDS,
    Lanes,
    attribute,
    dtype,
    is_constant,
    lanes,
    last_axis,
    operand,
    orders,
    shape,
)

_ACTIVATION, _GATE, _RESIDUAL = "activation", "gate", "residual"


@dataclass(frozen=True)
class FuseEpilogue(Pass):
    def run(self, graph: Graph) -> Result:
        return result(rewrite(graph, RULES))


def _bare(linear: Op) -> str:
    """Why nothing more can be folded before a linear's residual; "" if something can."""
    if residual_of(linear) is not None:
        return "the linear adds a residual already"
    if attribute(linear, "activation") != "none" or attribute(linear, "gated"):
        return "the linear has an activation already"
    return ""


def _activation(op: Op, view: View) -> Replacement | Miss:
    linear = view.made_by(op.args[0], *LINEARS)
    if linear is None:
        return None
    reason = _bare(linear)
    if not reason and view.num_uses(linear.out) != 1:
        reason = "the linear's result is used elsewhere too"
    if reason:
        return Miss(_ACTIVATION, op, reason)
    return view.op(linear.kind, *linear.args, **{**linear.attrs, "activation": op.kind})


def _gated(op: Op, view: View) -> Replacement | Miss:
    """act(one half of a linear's outputs) * the other half."""
    for gate, up in orders(op):
        activation = view.made_by(gate, *ACTIVATION_KINDS)
        inner = activation.args[0] if activation is not None else gate
        first, second = lanes(view, inner), lanes(view, up)
        linear = view.made_by(first.base, *LINEARS) if first is not None else None
        if first is None or second is None or linear is None or first.base != second.base:
            continue
        if activation is None and view.made_by(up, *ACTIVATION_KINDS) is not None:
            continue
        middle = [v for v in (inner, gate) if isinstance(v, Value)] if activation is not None else [inner]
        reason = _not_halves(first, second) or _bare(linear) or _shared(linear, [*middle, up], view)
        if reason:
            return Miss(_GATE, op, reason)
        kind = activation.kind if activation is not None else "none"
        args = linear.args if first.start == 0 else _swapped(linear, view)
        attrs: dict[str, Any] = {**linear.attrs, "activation": kind, "gated": True}
        return view.op(linear.kind, *args, **attrs)
    return None


def _not_halves(first: Lanes, second: Lanes) -> str:
    width = shape(first.base)[-1]
    halves = {(first.start, first.count), (second.start, second.count)}
    if first.step != 1 or second.step != 1 or not isinstance(width, int) or width % 2:
        return "the two factors are not halves of the linear's outputs"
    expected = {(0, width // 2), (width // 2, width // 2)}
    return "" if halves == expected else "the two factors are not halves of the linear's outputs"


def _shared(linear: Op, middle: list[Arg], view: View) -> str:
    """A split reads the linear once, two slices twice; anything more is another reader."""
    if any(view.num_uses(v) != 1 for v in middle if isinstance(v, Value)):
        return "a half is used elsewhere too"
    readers = {op.outs[0].name for op in _selections(middle, linear, view)}
    return "" if view.num_uses(linear.out) == len(readers) else "the linear's result is used elsewhere too"


def _selections(values: list[Arg], linear: Op, view: View) -> Iterator[Op]:
    for value in values:
        op = view.made_by(value, "split", "slice")
        if op is not None and op.args[0] == linear.out:
            yield op


def _swapped(linear: Op, view: View) -> list[Arg]:
    """The operands with the two halves of the outputs exchanged, of each expert where there are some."""
    x, weight, *rest = linear.args
    bias = bias_of(linear)
    others = [_exchange(a, view, last_axis(a)) if a is bias and a is not None else a for a in rest]
    if linear.kind == "linear":
        return [x, _exchange(weight, view, 0), *others]
    count, (rows, width) = linear.attrs["num_experts"], shape(weight)
    stack = view.op("reshape", weight, shape=(count, cast(int, rows) // count, width))
    return [x, view.op("reshape", _exchange(stack, view, 1), shape=(rows, width)), *others]


def _exchange(weight: Arg, view: View, axis: int) -> Value:
    half = cast(int, shape(weight)[axis]) // 2
    first = view.op("slice", weight, axis=axis, start=0, stop=half)
    second = view.op("slice", weight, axis=axis, start=half, stop=2 * half)
    return view.op("concat", second, first, axis=axis)


def _residual(op: Op, view: View) -> Replacement | Miss:
    """linear + x, where x has the linear's shape."""
    missed: Miss | None = None
    for residual, y in orders(op):
        linear = view.made_by(y, "linear")
        if linear is None or is_constant(view, residual):
            continue
        reason = _no_residual(linear, residual, view)
        if not reason:
            args = [*linear.args, *(None,) * (3 - len(linear.args)), residual]
            return view.op("linear", *args, **linear.attrs)
        missed = missed or Miss(_RESIDUAL, op, reason)
    return missed


def _no_residual(linear: Op, residual: Arg, view: View) -> str:
    if operand(linear, 3) is not None:
        return "the linear adds a residual already"
    if view.num_uses(linear.out) != 1:
        return "the linear's result is used elsewhere too"
    if shape(residual) != shape(linear.out) or dtype(residual) != dtype(linear.out):
        return f"what is added is {list(shape(residual))}, not {list(shape(linear.out))}"
    return ""


RULES = (
    Rule("bias", ("add",), add_bias),
    Rule(_ACTIVATION, ACTIVATION_KINDS, _activation),
    Rule(_GATE, ("mul",), _gated),
    Rule(_RESIDUAL, ("add",), _residual),
)
