"""Calls of the kernel of linear recurrences."""

from __future__ import annotations

from typing import cast

from codegen.cpp.context import Context, dtype_of, refuse, shape_of
from codegen.kv_block import BLOCKS, block_bytes, stream_places
from ir.graph import Arg, Op, Value
from ir.types import KV, DType
from passes.match import operand_named

MAX_KEY_SIZE = 4096  # a state's column is kept on the stack
STREAMS = ("key", "value", "decay", "beta", "state")


def paged_recurrence(ctx: Context, op: Op) -> list[str]:
    state, q, k, v, decay, table, _, _ = op.args[:8]
    beta, rates, out = operand_named(op, "beta"), operand_named(op, "rates"), op.outs[0]
    kv = cast(KV, cast(Value, state).type)
    _check(op, kv, [x for x in (q, k, v, decay, beta, rates, out) if x is not None])
    (groups, keys), (heads, size) = shape_of(k)[1:], shape_of(v)[1:]
    group = f"s.groups[{ctx.kv_group[cast(Value, state).name]}]"
    kind = "OF_RATES" if rates is not None else "OF_HEAD" if shape_of(decay)[2] == 1 else "OF_KEY"
    places = dict(zip((s.name for s in kv.streams), stream_places(kv, op.attr("layer")), strict=True))
    at = ", ".join(str(places[name].codes if name in places else -1) for name in STREAMS)
    operands = ", ".join(_operand(ctx, x) for x in (q, k, v, decay, beta))
    return [
        f"RecurrenceArgs args{{{operands}, {ctx.pointer(rates)}, {ctx.pointer(out)}, {ctx.ld(out)},",
        f"                    {groups}, {heads}, {size}, (char*){group}.data, {block_bytes(kv)}, {{{at}}},",
        f"                    {ctx.pointer(table)}, {group}.table_stride, s.lens, s.starts, R}};",
        f"recurrence<{keys}, {kind}, {'true' if beta is not None else 'false'}, {kv.block}>(th, args);",
    ]


def _operand(ctx: Context, x: Arg) -> str:
    return f"{{{ctx.pointer(x)}, {0 if x is None else ctx.ld(x)}}}"


def _check(op: Op, kv: KV, operands: list[Arg]) -> None:
    """Raises CodegenError for what the kernel is not for."""
    if kv.block not in BLOCKS:
        raise refuse(op, f"blocks of {kv.block} tokens; there are those of {', '.join(map(str, BLOCKS))}")
    others = {dtype_of(x) for x in operands} - {DType.F32}
    if others:
        raise refuse(op, f"a recurrence of {', '.join(sorted(others))}; there is f32")
    keys = shape_of(op.args[2])[2]
    if not isinstance(keys, int) or keys > MAX_KEY_SIZE:
        raise refuse(op, f"keys of {keys} elements; there are those of up to {MAX_KEY_SIZE}")
