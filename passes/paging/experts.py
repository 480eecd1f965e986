"""How the ops of a mixture of experts are lowered to the paged form: see passes/paging/rules.py.

A product of rows with one fixed matrix for each of E is a linear of which every token uses all E.
"""

from __future__ import annotations

from ir.graph import Arg, Op
from passes.match import operand
from passes.paging.layout import Layout, T
from passes.paging.lowering import Lowering, shape_of
from passes.paging.rules import RULES as GENERAL
from passes.paging.rules import Rule


def _topk(low: Lowering, op: Op) -> None:
    x = _rows(low, op, op.args[0])
    outs = low.emit_all(op, "topk", low.new(op.args[0]), **op.attrs)
    low.place(op, *outs, layouts=tuple(Layout(shape_of(o), x.token) for o in op.outs))


def _take_along(low: Lowering, op: Op) -> None:
    _rows(low, op, op.args[0])
    low.place(op, low.emit(op, "take_along", low.new(op.args[0]), low.new(op.args[1])))


def _moe_linear(low: Lowering, op: Op) -> None:
    x, experts = _rows(low, op, op.args[0]), _rows(low, op, op.args[2])
    if x.token != experts.token:
        low.refuse(op, "x and experts have their tokens on different axes")
    if any(low.layout(a) is not None for a in (op.args[1], operand(op, 3))):
        low.refuse(op, "the weight depends on the tokens")
    low.place(op, low.emit(op, "moe_linear", *(low.new(a) for a in op.args), **op.attrs))


def _rows(low: Lowering, op: Op, arg: Arg) -> Layout:
    """The layout of an operand that has tokens, whose last axis they are not."""
    found = low.layout(arg)
    if found is None:
        low.refuse(op, "only some of its operands depend on the tokens")
    if found.from_right == 1:
        low.refuse(op, f"{op.kind} runs along the tokens")
    return found


def _matmul(low: Lowering, op: Op) -> None:
    if not _every_matrix(low, op):
        GENERAL["matmul"](low, op)


def _every_matrix(low: Lowering, op: Op) -> bool:
    """x [..,S,K] times fixed matrices [E,K,N], as moe_linear with experts 0..E-1; False for another."""
    x, shape, out = low.layout(op.args[0]), shape_of(op.args[1]), shape_of(op.outs[0])
    if x is None or low.layout(op.args[1]) is not None or x.from_right != 2 or len(shape) < 3:
        return False
    count, inputs, outputs = shape[-3:]
    fits = all(n == 1 for n in (*shape[:-3], *out[:-3])) and isinstance(count, int)
    if not fits or out[-3] != count:
        return False
    own = len(x.shape) > 2 and x.shape[-3] == count  # a row for each matrix, or one for all of them
    rows = low.shaped(op, low.new(op.args[0]), (T, count, inputs) if own else (T, inputs))
    turned = low.emit(op, "transpose", low.shaped(op, low.new(op.args[1]), shape[-3:]), perm=(0, 2, 1))
    stacked = low.emit(op, "reshape", turned, shape=(count * outputs, inputs))
    every = low.emit(op, "expand", low.emit(op, "iota", size=count), shape=(T, count))
    low.place(op, low.emit(op, "moe_linear", rows, stacked, every, num_experts=count))
    return True


RULES: dict[str, Rule] = {
    "topk": _topk,
    "take_along": _take_along,
    "moe_linear": _moe_linear,
    "matmul": _matmul,
}
