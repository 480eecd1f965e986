"""Writing a step's keys and values into the cache."""

from __future__ import annotations

from typing import cast

from codegen.kv_block import block_bytes, stream_offsets
from codegen.triton.context import POINTERS, Context, shape_of
from codegen.triton.launch import Arg, Case, always, cdiv, expression
from codegen.triton.render import render
from codegen.triton.schedule import row_tile
from ir.graph import Op, Value
from ir.types import KV


def kv_write(ctx: Context, op: Op) -> list[Case]:
    """All streams of a layer in one launch; what is written has the stream's element type."""
    state, slots = cast(Value, op.args[0]), cast(Value, op.args[-1])
    kv = cast(KV, state.type)
    offsets, layer_bytes = stream_offsets(kv)
    hooks: list[dict[str, int]] = []
    args: dict[str, Arg] = {"slots": ctx.pointer(slots)}
    for index, (stream, offset) in enumerate(zip(kv.streams, offsets, strict=True)):
        x = cast(Value, op.args[1 + index])
        args[f"x{index}"] = ctx.pointer(x)
        args[f"pool{index}"] = ctx.cache(
            state, layer_bytes * op.attr("layer") + offset, POINTERS[stream.dtype]
        )
        hooks.append(
            {
                "heads": stream.heads,
                "size": stream.head_size,
                "ld": ctx.ld(x),
                "stride": block_bytes(kv) // stream.dtype.size_bytes,
            }
        )
    rows = expression(shape_of(slots)[0])
    widest = max(s.heads * s.head_size for s in kv.streams)
    tile = row_tile(ctx.device, widest)
    launch = ctx.launch(
        "kv_write",
        render("kv_write", streams=hooks, block=kv.block),
        args | {"rows": ctx.size(rows)},
        (cdiv(rows, tile.rows), cdiv(widest, tile.block)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )
    return always(launch)
