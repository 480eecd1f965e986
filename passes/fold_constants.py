"""Constant folding: pointwise ops on constants of one value, and moves of them, become `full`.

Numbers are those of the interpreter in f32. Weight ops are left alone: they are evaluated when weights are
packed. What depends on the value of a size does not fold; a `full` of symbolic shape holds one known value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.graph import Arg, Graph, Op, Scalar, Value, tensor_of
from ir.ops import OPS, RefCall
from ir.rewrite import Miss, Replacement, Rule, View, keep_output_names, rewrite
from ir.types import DType
from passes.base import Pass, Result
from passes.match import POINTWISE, attribute, orders, shape, tensor

_MOVES = ("reshape", "transpose", "expand", "slice")


@dataclass(frozen=True)
class FoldConstants(Pass):
    def run(self, graph: Graph) -> Result:
        found = rewrite(graph, RULES)
        return Result(keep_output_names(graph, found.graph), found.count, found.misses)


def _known(arg: Arg, view: View) -> bool | int | float | None:
    """The one value of every element of an operand."""
    if isinstance(arg, Scalar):
        return arg.value
    op = view.made_by(arg, "full")
    return op.attr("value") if op is not None else None


def _full(view: View, like: Value, value: Any) -> Value:
    found = tensor_of(like)
    return view.op("full", shape=found.shape, value=value, dtype=str(found.dtype))


def _fold_pointwise(op: Op, view: View) -> Replacement | Miss:
    """All operands are known: evaluate the op's own reference on scalars."""
    args = [_known(a, view) for a in op.args]
    if any(a is None for a in args):
        return None
    arrays = tuple(
        v if t is None else np.asarray(v, t.dtype.numpy)
        for v, t in zip(args, map(tensor, op.args), strict=True)
    )
    with np.errstate(all="ignore"):
        (result,) = OPS[op.kind].reference(
            RefCall(op.kind, arrays, OPS[op.kind].complete(op.attrs), np.float32)
        )
    return _full(view, op.out, _python(result, op.out))


def _python(array: Any, out: Value) -> bool | int | float:
    kind = tensor_of(out).dtype
    value = np.asarray(array).reshape(())
    if kind is DType.BOOL:
        return bool(value)
    return float(value.astype(np.float64)) if kind.is_float else int(value)


def _fold_move(op: Op, view: View) -> Replacement | Miss:
    value = _known(op.args[0], view)
    return None if value is None else _full(view, op.out, value)


def _fold_dim(op: Op, view: View) -> Replacement | Miss:
    size = attribute(op, "size")
    if not isinstance(size, int):
        return None
    return _full(view, op.out, float(size) if DType(attribute(op, "dtype")).is_float else size)


def _fold_where(op: Op, view: View) -> Replacement | Miss:
    condition = _known(op.args[0], view)
    if condition is None:
        return None
    return _spread(op.args[1 if condition else 2], op.out, view)


def _fold_logic(op: Op, view: View) -> Replacement | Miss:
    """x & true and x | false are x; x & false and x | true are constant."""
    for x, y in orders(op):
        value = _known(y, view)
        if value is not None:
            keeps = bool(value) is (op.kind == "and")
            return _spread(x, op.out, view) if keeps else _full(view, op.out, bool(value))
    return None


def _spread(arg: Arg, out: Value, view: View) -> Arg:
    """An operand in the shape of the result that it becomes."""
    if isinstance(arg, Scalar):
        return _full(view, out, arg.value)
    return arg if shape(arg) == shape(out) else view.op("expand", arg, shape=shape(out))


RULES = (
    Rule("fold pointwise", POINTWISE, _fold_pointwise),
    Rule("fold move", _MOVES, _fold_move),
    Rule("fold dim", ("dim",), _fold_dim),
    Rule("fold where", ("where",), _fold_where),
    Rule("fold logic", ("and", "or"), _fold_logic),
)
