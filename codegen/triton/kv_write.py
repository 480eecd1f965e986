"""Writing a step's keys and values into the cache, and sealing the blocks that it fills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from codegen.triton.context import Context, literal, refuse, shape_of
from codegen.triton.kv_layout import StreamLayout
from codegen.triton.launch import Arg, Case, Expr, always, cdiv, expression
from codegen.triton.quantize import ENCODE
from codegen.triton.render import render
from codegen.triton.schedule import power_of_two, row_tile, whole_rows
from ir.graph import Op, Value
from ir.ops.quantize import LARGEST
from ir.types import KV


@dataclass(frozen=True)
class StreamHooks(StreamLayout):
    """What templates ask of a stream. source: the pointer to its elements. ld, source_stride: from one
    token's, or block's, elements to the next.
    """

    source: str
    ld: int = 0
    source_stride: int = 0

    @property
    def name(self) -> str:
        """The pointer to its codes."""
        return f"pool{self.index}"

    @property
    def block(self) -> int:
        return self.kv.block

    @property
    def quantized(self) -> bool:
        return self.stream.is_quantized

    @property
    def minimum(self) -> bool:
        return self.stream.has_minimum

    @property
    def lanes(self) -> int:
        return power_of_two(self.bytes)

    @property
    def steps(self) -> str:
        return literal(float((1 << self.stream.dtype.bits) - 1))

    @property
    def largest(self) -> str:
        return literal(LARGEST[self.stream.dtype])

    @property
    def encode(self) -> str:
        return ENCODE[self.stream.dtype]

    def pointers(self, ctx: Context, state: Value) -> dict[str, Arg]:
        scales = {f"{self.name}_{name}": arg for name, arg in self.scales(ctx, state).items()}
        return {self.name: self.codes(ctx, state), **scales}


def kv_write(ctx: Context, op: Op) -> list[Case]:
    """All streams of a layer in one launch: elements in the stream's type, or its codes."""
    state, slots = cast(Value, op.args[0]), cast(Value, op.args[-1])
    kv = cast(KV, state.type)
    hooks: list[StreamHooks] = []
    args: dict[str, Arg] = {"slots": ctx.pointer(slots)}
    for index in range(len(kv.streams)):
        x = cast(Value, op.args[1 + index])
        hooks.append(StreamHooks(kv, op.attr("layer"), index, f"x{index}", ld=ctx.ld(x)))
        args |= {f"x{index}": ctx.pointer(x), **hooks[index].pointers(ctx, state)}
    rows = expression(shape_of(slots)[0])
    args["rows"] = ctx.size(rows)
    if any(s.quantized for s in hooks):
        return _write_codes(ctx, hooks, args, rows)
    return _write(ctx, hooks, args, rows)


def _write(ctx: Context, hooks: list[StreamHooks], args: dict[str, Arg], rows: Expr) -> list[Case]:
    widest = max(s.heads * s.size for s in hooks)
    tile = row_tile(ctx.device, widest)
    launch = ctx.launch(
        "kv_write",
        render("kv_write", streams=hooks, block=hooks[0].block),
        args,
        (cdiv(rows, tile.rows), cdiv(widest, tile.block)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )
    return always(launch)


def _write_codes(ctx: Context, hooks: list[StreamHooks], args: dict[str, Arg], rows: Expr) -> list[Case]:
    tile = whole_rows(ctx.device, max(s.size for s in hooks))
    lines: Expr = ("*", rows, max(s.heads for s in hooks))
    launch = ctx.launch(
        "kv_write_codes",
        render("kv_write_codes", streams=hooks),
        args,
        (cdiv(lines, tile.rows),),
        {"LINES": tile.rows},
        num_warps=tile.num_warps,
    )
    return always(launch)


def kv_seal(ctx: Context, op: Op) -> list[Case]:
    """A program for each head of each block that the step fills, of all streams."""
    state, tail, table, tail_table, lens, starts = (cast(Value, a) for a in op.args)
    kv, exact = cast(KV, state.type), cast(KV, tail.type)
    if len({s.heads for s in kv.streams}) > 1:
        raise refuse(op, "streams of different numbers of heads in a group whose blocks are sealed")
    hooks: list[StreamHooks] = []
    args: dict[str, Arg] = {}
    for index in range(len(kv.streams)):
        of = StreamLayout(exact, op.attr("layer"), index)
        hooks.append(StreamHooks(kv, of.layer, index, f"tail{index}", source_stride=of.stride))
        args |= {f"tail{index}": of.codes(ctx, tail), **hooks[index].pointers(ctx, state)}
    for name, value in (("table", table), ("tail_table", tail_table), ("lens", lens), ("starts", starts)):
        args[name] = ctx.pointer(value)
    requests = shape_of(lens)[0]
    args |= {"requests": ctx.size(requests), "table_width": ctx.size(shape_of(table)[1])}
    args |= {"tail_width": ctx.size(shape_of(tail_table)[1])}
    tiles: Expr = ("+", ("//", "T", kv.block), expression(requests))
    elements = kv.block * max(s.head_size for s in kv.streams)
    num_warps = 1 if ctx.device.interpreted else max(1, min(16, elements // (32 * ctx.device.warp_size)))
    launch = ctx.launch(
        "kv_seal",
        render("kv_seal", streams=hooks, block=kv.block),
        args,
        (tiles, kv.streams[0].heads),
        num_warps=num_warps,
    )
    return always(launch)
