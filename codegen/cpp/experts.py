"""Calls of the kernels of a mixture of experts: choosing experts, and the linears of those chosen."""

from __future__ import annotations

from typing import Any, cast

from codegen.cpp.context import Context, dtype_of, refuse, shape_of
from codegen.cpp.linears import check_factors, epilogue, flat_rows
from codegen.cpp.qlinears import FLOATS, GRIDS, in_integers, matrix_of, spelled
from codegen.cpp.rows import inner_rows
from codegen.cpp.spelling import call, size
from ir.dims import product
from ir.graph import Op, Value
from passes.match import attribute, operand_named

MOST_EXPERTS = 1024  # that a kernel has counters for: moe.h


def topk(ctx: Context, op: Op) -> list[str]:
    x, (values, indices) = cast(Value, op.args[0]), op.outs
    rows = inner_rows(ctx, x)
    return [call("topk_rows", ctx.pointer(x), rows, op.attr("k"), ctx.pointer(values), ctx.pointer(indices))]


def take_along(ctx: Context, op: Op) -> list[str]:
    x, indices = (cast(Value, a) for a in op.args)
    if ctx.is_constant(x) or ctx.is_constant(indices):
        raise refuse(op, "one operand is a constant and the other is not")
    rows = inner_rows(ctx, x), ctx.pointer(indices), inner_rows(ctx, indices)
    return [call("take_along_rows", ctx.pointer(x), *rows, ctx.pointer(op.out))]


def moe_linear(ctx: Context, op: Op) -> list[str]:
    w, experts, gated = cast(Any, op.args[1]), attribute(op, "num_experts"), attribute(op, "gated")
    check_factors(ctx, op)
    packed = ctx.weight(w, "paired" if gated else "panels", experts)
    sizes = shape_of(op.args[0])[-1], shape_of(op.out)[-1]
    return [
        epilogue(ctx, op, operand_named(op, "b"), None),
        call(
            f"moe_linear<{'true' if gated else 'false'}>", *_rows(ctx, op), *sizes, packed,
            *_experts(ctx, op), ctx.scratch(op), "finish",
        ),
    ]  # fmt: skip


def qmoe_linear(ctx: Context, op: Op) -> list[str]:
    x, gated, experts = cast(Value, op.args[0]), attribute(op, "gated"), attribute(op, "num_experts")
    if dtype_of(x) not in FLOATS:
        raise refuse(op, f"an x of {dtype_of(x)}; there are {' and '.join(FLOATS)}")
    matrix = matrix_of(ctx, op)
    name, grid = "qmoe_linear", ""
    if not in_integers(op):
        name, grid = "qmoe_linear_float", f", {GRIDS[attribute(op, 'x_dtype')]}"
    return [
        epilogue(ctx, op, operand_named(op, "b"), None),
        call(
            f"{name}<{'true' if gated else 'false'}{grid}>", *_rows(ctx, op), shape_of(op.out)[-1],
            spelled(ctx, matrix, "paired" if gated else "panels", experts), attribute(op, "x_group_size"),
            *_experts(ctx, op), ctx.scratch(op), "finish",
        ),
    ]  # fmt: skip


def _rows(ctx: Context, op: Op) -> tuple[str, str, str, str]:
    """(x, its row stride, pairs of a token and a slot, how many of them read one row)."""
    x, pairs = cast(Value, op.args[0]), shape_of(op.out)[:-1]
    fan = 1 if len(shape_of(x)) > len(pairs) else pairs[-1]
    return ctx.pointer(x), flat_rows(ctx, op, x)[1], size(product(pairs)), size(fan)


def _experts(ctx: Context, op: Op) -> tuple[str, int]:
    """(ids of the chosen experts, how many there are)."""
    ids, experts = cast(Value, operand_named(op, "experts")), attribute(op, "num_experts")
    if experts > MOST_EXPERTS:
        raise refuse(op, f"{experts} experts; there may be {MOST_EXPERTS}")
    if ctx.is_constant(ids) or not ctx.is_contiguous(ids):
        raise refuse(op, f"%{ids.name}, which chooses experts, is a constant or a view")
    return ctx.pointer(ids), experts
