"""RMSNorm (arXiv 1910.07467) and LayerNorm (arXiv 1607.06450), however written, become one op.

Three steps, each a rule, so that a norm without weight is one too: the quotient by the root mean square; the
product with a constant weight; the sum with a constant bias. A norm of centred values is a LayerNorm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ir.graph import Arg, Graph, Op, Value
from ir.rewrite import Miss, Replacement, Rule, View, rewrite
from passes.base import Pass, Result, result
from passes.match import attribute, is_constant, literal, operand, orders, shape, without_leading_ones

_CORE, _WEIGHT, _BIAS = "norm", "norm weight", "norm bias"


@dataclass(frozen=True)
class FuseNorm(Pass):
    def run(self, graph: Graph) -> Result:
        return result(rewrite(graph, RULES))


@dataclass(frozen=True)
class _Moment:
    """A mean over the last `rank` axes of a value, kept as axes of size 1."""

    of: Arg
    rank: int


def _core(op: Op, view: View) -> Replacement | Miss:
    """x * rsqrt(mean(x * x) + eps), or x / sqrt(mean(x * x) + eps)."""
    pairs = orders(op) if op.kind == "mul" else [op.args]
    root = "rsqrt" if op.kind == "mul" else "sqrt"
    for x, scale in pairs:
        inverse = view.made_by(scale, root)
        total = view.made_by(inverse.args[0], "add") if inverse is not None else None
        if total is None:
            continue
        square = _mean_square(total.args[0], view) or _mean_square(total.args[1], view)
        if isinstance(square, _Moment):
            return _norm(op, x, square, literal(total.args[1]), view)
        if isinstance(square, str):
            return Miss(_CORE, op, square)
    return None


def _norm(op: Op, x: Arg, square: _Moment, eps: float | None, view: View) -> Replacement | Miss:
    if eps is None:
        return Miss(_CORE, op, "what is added to the mean square is not a literal")
    if square.of != x:
        return Miss(_CORE, op, "the mean square is of another value than the one that is divided")
    centred = view.made_by(x, "sub")
    mean = _mean(centred.args[1], view) if centred is not None else None
    rank = square.rank if square.rank != 1 else None
    if centred is not None and isinstance(mean, _Moment) and mean == _Moment(centred.args[0], square.rank):
        return view.op("layer_norm", mean.of, eps=eps, rank=rank)
    return view.op("rms_norm", x, eps=eps, rank=rank)


def _mean_square(arg: Arg, view: View) -> _Moment | str | None:
    """The value whose squares a mean is of, or why it is none of a row."""
    mean = _mean(arg, view)
    if not isinstance(mean, _Moment):
        return mean
    square = view.made_by(mean.of, "mul")
    if square is None or square.args[0] != square.args[1]:
        return None
    return _Moment(square.args[0], mean.rank)


def _mean(arg: Arg, view: View) -> _Moment | str | None:
    """mean(x), sum(x) / n or sum(x) * (1/n), with the axes kept or put back."""
    shaped = view.made_by(arg, "reshape")
    op = view.made_by(shaped.args[0] if shaped is not None else arg, "mean", "mul", "div")
    found = op
    if op is not None and op.kind != "mean":
        found = view.made_by(op.args[0], "sum")
    if op is None or found is None:
        return None
    of, axes = found.args[0], tuple(sorted(attribute(found, "axes")))
    sizes, rank = shape(of), len(axes)
    if op is not found and not _is_share(op, sizes[len(sizes) - rank :]):
        return None
    if axes != tuple(range(len(sizes) - rank, len(sizes))):
        return f"the mean is over axes {list(axes)}, not the last ones of {list(sizes)}"
    kept = (*sizes[: len(sizes) - rank], *(1,) * rank)
    return _Moment(of, rank) if shape(arg) == kept else None


def _is_share(op: Op, sizes: tuple[Any, ...]) -> bool:
    """Whether a product or quotient by a literal divides by the number of elements."""
    value = literal(op.args[1])
    if value is None or not all(isinstance(n, int) for n in sizes):
        return False
    return math.isclose(value if op.kind == "div" else 1 / value, math.prod(sizes), rel_tol=1e-7)


def _weight(op: Op, view: View) -> Replacement | Miss:
    return _parameter(op, view, ("rms_norm", "layer_norm"), 1)


def _bias(op: Op, view: View) -> Replacement | Miss:
    return _parameter(op, view, ("layer_norm",), 2)


def _parameter(op: Op, view: View, kinds: tuple[str, ...], index: int) -> Replacement | Miss:
    """A constant that a norm's result is multiplied with (index 1) or that is added to it (index 2)."""
    rule = _WEIGHT if index == 1 else _BIAS
    for y, given in orders(op):
        norm = view.made_by(y, *kinds)
        if norm is None or not is_constant(view, given):
            continue
        if operand(norm, index) is not None or (index == 1 and operand(norm, 2) is not None):
            return Miss(rule, op, "the norm has one already")
        if view.num_uses(norm.out) != 1:
            return Miss(rule, op, "the norm's result is used elsewhere too")
        if norm.out.type != op.out.type:
            return Miss(rule, op, f"{list(shape(given))} makes the result wider than {list(shape(y))}")
        args: list[Arg] = [norm.args[0], operand(norm, 1), _trimmed(given, view)]
        return view.op(norm.kind, *(args if index == 2 else (args[0], args[2])), **norm.attrs)
    return None


def _trimmed(arg: Arg, view: View) -> Value | Arg:
    sizes = without_leading_ones(shape(arg))
    return arg if sizes == shape(arg) else view.op("reshape", arg, shape=sizes or (1,))


RULES = (
    Rule(_CORE, ("mul", "div"), _core),
    Rule(_WEIGHT, ("mul",), _weight),
    Rule(_BIAS, ("add",), _bias),
)
