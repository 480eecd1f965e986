"""Codes of floats and floats of codes: quantize, dequantize, and rows of a quantised table."""

from __future__ import annotations

from typing import cast

from codegen.triton.context import FLOATS, TYPES, Context, dtype_of, literal, refuse, shape_of
from codegen.triton.devices import Device
from codegen.triton.launch import Arg, Case, Expr, Launch, always, cdiv, expression, times
from codegen.triton.render import render
from codegen.triton.rows import Rows
from codegen.triton.schedule import row_tile, whole_rows
from codegen.triton.weights import per_byte, row_bytes
from ir.dims import product
from ir.graph import Op, Value, Weight
from ir.ops.quantize import LARGEST
from ir.types import DType
from passes.match import attribute, operand

ENCODE = {DType.I8: "to_i8", DType.F8E4M3: "to_e4m3"}
LOOPED = 16384  # elements of a group that are taken in parts from then on


def decode(device: Device, dtype: DType) -> str:
    """An expression for CODE as f32."""
    if dtype is not DType.F8E4M3:
        return "CODE.to(tl.float32)"
    if device.arch in ("sm_90", "sm_100"):  # they have an instruction
        return "CODE.to(tl.float8e4nv, bitcast=True).to(tl.float32)"
    return "from_e4m3(CODE)"


def quantize(ctx: Context, op: Op) -> list[Case]:
    x, (codes, scales) = cast(Value, op.args[0]), op.outs
    if dtype_of(x) not in FLOATS:
        raise refuse(op, f"an operand of type {dtype_of(x)}; there is {', '.join(FLOATS)}")
    to = {"q": ctx.pointer(codes), "scales": ctx.pointer(scales)}
    rows, size = Rows.of(ctx, op, x), attribute(op, "group_size")
    return always(quantize_launch(ctx, x, rows, dtype_of(codes), size, to, rows.width, dtype_of(scales)))


def quantize_launch(
    ctx: Context,
    x: Value,
    rows: Rows,
    dtype: DType,
    group_size: int,
    to: dict[str, Arg],
    q_ld: int,
    scale: DType = DType.F32,
) -> Launch:
    """Codes and scales of rows. to: q, whose rows are q_ld bytes apart, and scales, row after row."""
    size = min(group_size or rows.width, rows.width)
    groups = -(-rows.width // size)
    tile = whole_rows(ctx.device, size, LOOPED)
    body = render(
        "quantize", rows=rows, groups=groups, size=size, looped=tile.block < size, q_ld=q_ld,
        encode=ENCODE[dtype], largest=literal(LARGEST[dtype]), scale_type=TYPES[scale],
    )  # fmt: skip
    lines: Expr = times(rows.count, groups)
    return ctx.launch(
        "quantize",
        body,
        {"x": ctx.pointer(x), **to, "rows": ctx.size(rows.count)},
        (cdiv(lines, tile.rows),),
        {"LINES": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )


def dequantize(ctx: Context, op: Op) -> list[Case]:
    q, scale = cast(Value, op.args[0]), cast(Value, op.args[1])
    if dtype_of(q).bits < 8:
        raise refuse(op, f"codes of {dtype_of(q)} outside of weights and caches")
    rows = {"q_rows": Rows.of(ctx, op, q), "s_rows": Rows.of(ctx, op, scale)}
    for each in (operand(op, 2), operand(op, 3)):
        if each is not None and Rows.of(ctx, op, cast(Value, each)).start != rows["s_rows"].start:
            raise refuse(op, "its scales, zeros and offsets do not lie alike")
    return _floats(ctx, op, 0, {"q": ctx.pointer(q)}, rows["q_rows"].count, lookup=False, **rows)


def qembed(ctx: Context, op: Op) -> list[Case]:
    """out[i] = the floats of the table's row ids[i]."""
    ids, q = cast(Value, op.args[0]), cast("Value | Weight", op.args[1])
    if not ctx.is_contiguous(ids):
        raise refuse(op, f"%{ids.name} is a view whose elements are not side by side")
    if not all(ctx.is_constant(a) for a in op.args[1:] if a is not None):
        raise refuse(op, "a table that is not constant")
    vocab, width = (cast(int, n) for n in shape_of(q))
    args = {"q": ctx.codes(q), "ids": ctx.pointer(ids), "size": ctx.size(vocab)}
    count = expression(product(shape_of(ids)))
    groups = cast(int, shape_of(op.args[2])[-1])
    return _floats(ctx, op, 1, args, count, lookup=True, q_ld=row_bytes(dtype_of(q), width), groups=groups)


def _floats(
    ctx: Context, op: Op, first: int, args: dict[str, Arg], count: Expr, **hooks: object
) -> list[Case]:
    """first: the operand that is the codes; scale, zero and offset follow."""
    if dtype_of(op.out) not in FLOATS:
        raise refuse(op, f"a result of type {dtype_of(op.out)}; there is {', '.join(FLOATS)}")
    dtype, width, zero = dtype_of(op.args[first]), cast(int, shape_of(op.out)[-1]), attribute(op, "zero")
    given = {n: operand(op, first + 1 + i) for i, n in enumerate(("scale", "zero", "offset"))}
    args |= {n: ctx.pointer(cast("Value | Weight", a)) for n, a in given.items() if a is not None}
    tile = row_tile(ctx.device, width)
    body = render(
        "dequantize", width=width, per=per_byte(dtype), decode=decode(ctx.device, dtype),
        group_size=attribute(op, "group_size"), zero=literal(float(zero)) if zero else "",
        zeros=given["zero"] is not None, offsets=given["offset"] is not None, **hooks,
    )  # fmt: skip
    launch = ctx.launch(
        op.kind,
        body,
        {**args, "out": ctx.pointer(op.out), "rows": ctx.size(count)},
        (cdiv(count, tile.rows), cdiv(width, tile.block)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )
    return always(launch)
