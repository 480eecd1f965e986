"""The largest elements of a row, and elements of a row at indices of its own."""

from __future__ import annotations

from typing import cast

from codegen.triton.context import FLOATS, Context, dtype_of, refuse, shape_of
from codegen.triton.launch import Case, always, cdiv
from codegen.triton.moves import outside
from codegen.triton.render import render
from codegen.triton.rows import Rows
from codegen.triton.schedule import power_of_two, row_tile, whole_rows
from ir.graph import Op, Value
from ir.types import DType
from passes.match import attribute

MOST = 16384  # elements of a row that a program holds
INTEGERS = (DType.I32, DType.I64, DType.I8, DType.U8)


def topk(ctx: Context, op: Op) -> list[Case]:
    x, k = cast(Value, op.args[0]), attribute(op, "k")
    if dtype_of(x) not in (*FLOATS, *INTEGERS):
        raise refuse(op, f"an operand of type {dtype_of(x)}; there is {', '.join((*FLOATS, *INTEGERS))}")
    rows = Rows.of(ctx, op, x)
    if rows.width > MOST:
        raise refuse(op, f"rows of {rows.width} elements; a program holds {MOST} at most")
    tile = whole_rows(ctx.device, rows.width, MOST)
    launch = ctx.launch(
        "topk",
        render("topk", rows=rows, k=k, floats=dtype_of(x).is_float, wide=dtype_of(x) is DType.I64),
        {
            "x": ctx.pointer(x),
            "values": ctx.pointer(op.outs[0]),
            "indices": ctx.pointer(op.outs[1]),
            "rows": ctx.size(rows.count),
        },
        (cdiv(rows.count, tile.rows),),
        {"ROWS": tile.rows, "BLOCK": power_of_two(rows.width)},
        num_warps=tile.num_warps,
    )
    return always(launch)


def take_along(ctx: Context, op: Op) -> list[Case]:
    """out[.., j] = x[.., indices[.., j]]."""
    x, indices = cast(Value, op.args[0]), cast(Value, op.args[1])
    rows, at = Rows.of(ctx, op, x), Rows.of(ctx, op, indices)
    width = cast(int, shape_of(op.out)[-1])
    tile = row_tile(ctx.device, width)
    launch = ctx.launch(
        "take_along",
        render("take_along", rows=rows, at=at, width=width, outside=outside(x)),
        {
            "x": ctx.pointer(x),
            "indices": ctx.pointer(indices),
            "out": ctx.pointer(op.out),
            "rows": ctx.size(rows.count),
        },
        (cdiv(rows.count, tile.rows), cdiv(width, tile.block)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )
    return always(launch)
