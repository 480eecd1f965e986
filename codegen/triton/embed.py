"""Embedding: rows of a table."""

from __future__ import annotations

from typing import cast

from codegen.triton.context import Context, refuse, shape_of
from codegen.triton.launch import Case, always, cdiv, expression
from codegen.triton.render import render
from codegen.triton.schedule import row_tile
from ir.dims import product
from ir.graph import Op, Value


def embed(ctx: Context, op: Op) -> list[Case]:
    """out[i] = table[ids[i]]."""
    ids, table = cast(Value, op.args[0]), cast(Value, op.args[1])
    if not ctx.is_contiguous(ids):
        raise refuse(op, f"%{ids.name} is a view whose elements are not side by side")
    width = cast(int, shape_of(table)[1])
    rows = expression(product(shape_of(ids)))
    tile = row_tile(ctx.device, width)
    launch = ctx.launch(
        "embed",
        render("embed", width=width),
        {
            "ids": ctx.pointer(ids),
            "table": ctx.pointer(table),
            "out": ctx.pointer(op.out),
            "rows": ctx.size(rows),
        },
        (cdiv(rows, tile.rows), cdiv(width, tile.block)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )
    return always(launch)
