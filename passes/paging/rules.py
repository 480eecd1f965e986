"""How each op is lowered to the paged form, and why it may be: the token-axis proof, op by op.

A rule emits the op on [T, rest] operands, or refuses. An op that is neither here nor pointwise is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ir.build import trim
from ir.dims import free_names
from ir.graph import Arg, Op, Scalar, Value
from ir.types import DType, Tensor
from passes.match import attribute, operand
from passes.paging.layout import Layout, S, T, reshaped, token_axes
from passes.paging.lowering import Lowering, shape_of

Rule = Callable[[Lowering, Op], None]
STATE = "needs state beyond keys and values"  # of each request, which recurrences alone have


def pointwise(low: Lowering, op: Op) -> None:
    out = low.result_layout(op)
    low.place(op, low.emit(op, op.kind, *(low.aligned(op, a, out) for a in op.args), **op.attrs))


def _norm(low: Lowering, op: Op) -> None:
    out = low.result_layout(op)
    if out.token >= len(out.shape) - attribute(op, "rank"):
        low.refuse(op, f"{op.kind} normalises over the tokens")
    pointwise(low, op)


def _rope(low: Lowering, op: Op) -> None:
    out = low.result_layout(op)
    if out.token == len(out.shape) - 1:
        low.refuse(op, "rope rotates along the token axis")
    pairs = [shape_of(a)[-1] for a in op.args[1:]]
    tables = [
        low.aligned(op, a, Layout((*out.shape[:-1], p), out.token))
        for a, p in zip(op.args[1:], pairs, strict=True)
    ]
    low.place(op, low.emit(op, "rope", low.aligned(op, op.args[0], out), *tables, **op.attrs))


def _linear(low: Lowering, op: Op) -> None:
    x = low.layout_of_operand(op)
    if x.token == len(x.shape) - 1:
        low.refuse(op, "linear sums over the tokens")
    if any(low.layout(a) is not None for a in op.args[1:3]):
        low.refuse(op, "the weight depends on the tokens")
    low.place(op, low.emit(op, "linear", *(low.new(a) for a in op.args), **op.attrs))


def _matmul(low: Lowering, op: Op) -> None:
    x, y = low.layout(op.args[0]), low.layout(op.args[1])
    fixed = y is None and len(shape_of(op.args[1])) == 2 and x is not None and x.from_right > 1
    batched = x is not None and y is not None and x.from_right == y.from_right and len(x.kept) == len(y.kept)
    if not fixed and not (batched and x is not None and x.from_right > 2):
        low.refuse(op, "matmul mixes tokens, and no attention was recognised here")
    low.place(op, low.emit(op, "matmul", low.new(op.args[0]), low.new(op.args[1])))


def _embed(low: Lowering, op: Op) -> None:
    if low.layout(op.args[1]) is not None:
        low.refuse(op, "the table depends on the tokens")
    low.place(op, low.emit(op, "embed", low.new(op.args[0]), low.new(op.args[1]), **op.attrs))


def _take(low: Lowering, op: Op) -> None:
    """Rows of a fixed table at indices that depend on the token, or fixed columns of rows."""
    if low.layout(op.args[1]) is None:
        before = low.layout_of_operand(op)
        x, axis = low.along(op, op.args[0], attribute(op, "axis"))
        value = low.emit(op, "take", x, low.new(op.args[1]), axis=axis)
        low.place(op, value, layouts=(Layout(shape_of(op.outs[0]), before.token),))
        return
    if low.layout(op.args[0]) is not None or op.attrs["axis"] != 0:
        low.refuse(op, "take picks among tokens")
    low.place(op, low.emit(op, "take", low.new(op.args[0]), low.new(op.args[1]), axis=0))


def _reshape(low: Lowering, op: Op) -> None:
    before = low.layout_of_operand(op)
    after = reshaped(before, shape_of(op.outs[0]))
    if after is None:
        low.refuse(
            op, f"reshape {list(before.shape)} to {list(shape_of(op.outs[0]))} breaks up the token axis"
        )
    low.place(op, low.new(op.args[0]), layouts=(after,))


def _transpose(low: Lowering, op: Op) -> None:
    before, after = low.layout_of_operand(op), low.result_layout(op)
    wanted = [op.attrs["perm"][i] for i in after.kept]  # the operand's axes in the result's order
    common = [i for i in wanted if i in before.kept]
    arg = low.shaped(op, low.new(op.args[0]), before.only(sorted(common)))
    if common != sorted(common):
        arg = low.emit(op, "transpose", arg, perm=(0, *(sorted(common).index(i) + 1 for i in common)))
    low.place(op, arg)


def _expand(low: Lowering, op: Op) -> None:
    out = low.result_layout(op)
    value = low.aligned(op, op.args[0], out)
    low.place(op, value if shape_of(value) == out.paged else low.emit(op, "expand", value, shape=out.paged))


def _cumsum(low: Lowering, op: Op) -> None:
    if low.layout_of_operand(op).token == attribute(op, "axis"):
        low.refuse(op, f"cumsum runs along the tokens, and a running sum {STATE}")
    _along_axis(low, op)


def _conv1d(low: Lowering, op: Op) -> None:
    """[B,C,S] with a fixed kernel; along another axis there is no form of it."""
    if low.layout_of_operand(op).from_right == 1:
        low.refuse(op, f"conv1d runs along the tokens, and a convolution over time {STATE}")
    low.refuse(op, "conv1d has its channels along the tokens")


def _along_axis(low: Lowering, op: Op) -> None:
    """softmax, cumsum, concat, split."""
    before = low.layout_of_operand(op)
    layouts = [low.layout(a) for a in op.args]
    if any(x is None or x.token != before.token for x in layouts):
        low.refuse(op, "only some of its operands depend on the tokens")
    placed = [low.along(op, a, attribute(op, "axis")) for a in op.args]
    attrs: dict[str, Any] = {**op.attrs, "axis": placed[0][1]}
    outs = low.emit_all(op, op.kind, *(x for x, _ in placed), **attrs)
    low.place(op, *outs, layouts=tuple(Layout(shape_of(o), before.token) for o in op.outs))


def _slice(low: Lowering, op: Op) -> None:
    before = low.layout(op.args[0])
    if before is None:
        _rows_at_positions(low, op)
        return
    x, axis = low.along(op, op.args[0], attribute(op, "axis"))
    value = low.emit(op, "slice", x, **{**op.attrs, "axis": axis})
    low.place(op, value, layouts=(Layout(shape_of(op.outs[0]), before.token),))


def _rows_at_positions(low: Lowering, op: Op) -> None:
    """table[start : start + S] holds row start + p for the token at position p."""
    start, stop, axis, step = (attribute(op, n) for n in ("start", "stop", "axis", "step"))
    rows = isinstance(start, int) and stop - start == S and axis == 0 and step == 1
    if not rows or any(free_names(d) for d in shape_of(op.args[0])):
        low.refuse(op, "the slice depends on the sequence length")
    index = low.new(low.builder.inputs[_POSITIONS])
    if start:
        index = low.emit(op, "add", index, Scalar(start))
    low.place(op, low.emit(op, "take", low.new(op.args[0]), index, axis=0))


def _reduce(low: Lowering, op: Op) -> None:
    before, axes = low.layout_of_operand(op), tuple(op.attrs["axes"])
    if before.token in axes:
        low.refuse(op, f"{op.kind} runs over the tokens")
    positions = tuple(p for p in (before.position(a) for a in axes) if p is not None)
    keepdims = attribute(op, "keepdims")
    low.place(op, low.emit(op, op.kind, low.new(op.args[0]), axes=positions, keepdims=keepdims))


def _iota(low: Lowering, op: Op) -> None:
    """0, 1, ..., S-1 are the positions."""
    if op.attrs["size"] != S:
        low.refuse(op, f"a range of {op.attrs['size']} is not the positions")
    dtype, position = DType(attribute(op, "dtype")), low.builder.inputs[_POSITIONS]
    same = position.type == Tensor(dtype, (T,))
    low.place(op, position if same else low.emit(op, "cast", position, dtype=str(dtype)))


def _full(low: Lowering, op: Op) -> None:
    low.place(op, low.emit(op, "full", **{**op.attrs, "shape": low.result_layout(op).paged}))


def _dim(low: Lowering, op: Op) -> None:
    if token_axes((op.attrs["size"],)):
        low.refuse(op, f"a number computed from the sequence length ({op.attrs['size']})")
    low.keep(op)


def _attention(low: Lowering, op: Op) -> None:
    if op.attr("mask") is None or operand(op, 3) is not None:
        low.refuse(op, "the attention's mask is not proved; fuse_attention must run first")
    for arg in op.args[:3]:
        layout = low.layout(arg)
        if layout is None or layout.token != 2 or layout.kept != (1, 3):
            low.refuse(op, "queries, keys and values must be [1,heads,S,head_size] and depend on the tokens")
    if any(low.layout(a) is not None for a in op.args[4:]):
        low.refuse(op, "sinks, biases and mask tables must not depend on the tokens")
    q, k, v = (low.new(a) for a in op.args[:3])
    slot = low.groups.place(low.builder, op, k, v)
    operands: list[Arg] = [q, slot.state, slot.table, low.lens, low.starts]
    attrs = {n: op.attrs[n] for n in ("scale", "mask", "softcap") if n in op.attrs}
    sinks, bias = (low.new(operand(op, i)) for i in (4, 5))
    rest = trim([sinks, bias, None, None, *(low.new(a) for a in op.args[6:])])  # no tail
    low.place(op, low.emit(op, "paged_attention", *operands, *rest, layer=slot.layer, **attrs))


def _recurrence(low: Lowering, op: Op) -> None:
    given = [operand(op, i) for i in range(5)]
    for arg in given:
        layout = low.layout(arg)
        if arg is not None and (layout is None or layout.token != 2 or layout.kept != (1, 3)):
            low.refuse(op, "its operands must be [1,heads,S,size] and depend on the tokens")
    rates = operand(op, 5)
    if low.layout(rates) is not None:
        low.refuse(op, "its rates depend on the tokens")
    q, k, v, decay, beta = (low.new(a) for a in given)
    slot, rest = low.groups.slot(op), trim([beta, low.new(rates)])
    operands = [slot.state, q, k, v, decay, slot.table, low.lens, low.starts, *rest]
    out, state = low.emit_all(op, "paged_recurrence", *operands, layer=slot.layer)
    low.groups.wrote(op, state)
    low.place(op, out)


def depends_on_length(value: Value) -> bool:
    return isinstance(value.type, Tensor) and bool(token_axes(value.type.shape))


_POSITIONS = 1  # index of %pos among the inputs

RULES: dict[str, Rule] = {
    "linear": _linear,
    "matmul": _matmul,
    "embed": _embed,
    "take": _take,
    "rms_norm": _norm,
    "layer_norm": _norm,
    "rope": _rope,
    "reshape": _reshape,
    "transpose": _transpose,
    "expand": _expand,
    "softmax": _along_axis,
    "cumsum": _cumsum,
    "conv1d": _conv1d,
    "concat": _along_axis,
    "split": _along_axis,
    "slice": _slice,
    "sum": _reduce,
    "mean": _reduce,
    "max": _reduce,
    "iota": _iota,
    "full": _full,
    "dim": _dim,
    "attention": _attention,
    "recurrence": _recurrence,
}
