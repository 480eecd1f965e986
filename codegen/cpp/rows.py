"""Calls of the kernels that compute along rows of a token: norms, rotations, reductions, small products."""

from __future__ import annotations

from typing import Any, cast

from codegen.cpp.context import Context, dtype_of, needs, refuse, shape_of
from codegen.cpp.spelling import call, literal, size
from ir.dims import product
from ir.graph import Op, Value, tensor_of
from ir.types import DType
from passes.match import attribute, operand


def inner_rows(ctx: Context, x: Value, rank: int = 1) -> str:
    """`Rows` of an operand whose last `rank` axes are one row."""
    shape = shape_of(x)
    width = product(shape[len(shape) - rank :])
    if len(shape) == rank:
        return f"Rows{{1, {size(width)}, 1, {size(width)}}}"
    middle = product(shape[1 : len(shape) - rank])
    return f"Rows{{{size(shape[0])}, {ctx.ld(x)}, {size(middle)}, {size(width)}}}"


def _norm_weight(op: Op, w: Any, rank: int) -> str:
    """Elements between the weights of a token's rows. The weight covers whole rows."""
    if w is None:
        return "0"
    shape, x = shape_of(w), shape_of(op.args[0])
    if shape[-rank:] != x[-rank:] or (
        len(shape) > rank and product(shape[:-rank]) not in (1, product(x[1:-rank]))
    ):
        raise refuse(op, f"a weight of shape {list(shape)} does not cover rows of {list(x)}")
    return "0" if product(shape[:-rank]) == 1 else str(product(x[-rank:]))


def norm(ctx: Context, op: Op) -> list[str]:
    needs(op, DType.F32, DType.BF16)
    x, rank = cast(Value, op.args[0]), attribute(op, "rank")
    w, b = operand(op, 1), operand(op, 2)
    steps = {_norm_weight(op, a, rank) for a in (w, b) if a is not None} or {"0"}
    if len(steps) > 1 or dtype_of(x) is not DType.F32:
        raise refuse(op, "weight and bias must have one shape and the input be f32")
    weights = [ctx.pointer(w)] if op.kind == "rms_norm" else [ctx.pointer(w), ctx.pointer(b)]
    eps = literal(op.attr("eps"), DType.F32)
    rows = inner_rows(ctx, x, rank)
    return [call(op.kind, ctx.pointer(x), rows, *weights, steps.pop(), eps, ctx.pointer(op.out))]


def rope(ctx: Context, op: Op) -> list[str]:
    needs(op, DType.F32)
    x, cos, sin = (cast(Value, a) for a in op.args)
    shape, angles = shape_of(x), shape_of(cos)
    heads = product(angles[1:-1])
    if (
        len(angles) != len(shape)
        or heads not in (1, product(shape[1:-1]))
        or ctx.ld(cos) != ctx.ld(sin)
        or angles[0] not in (1, shape[0])
    ):
        raise refuse(op, f"cos {list(angles)} does not fit {list(shape)} row by row")
    cs_ld = ctx.ld(cos) if angles[0] == shape[0] else "0"
    pairs = angles[-1]
    form = f"Rope{{{pairs}, {attribute(op, 'offset')}, {cs_ld}, {0 if heads == 1 else pairs}}}"
    name = f"rope<{'true' if attribute(op, 'interleaved') else 'false'}>"
    return [
        call(
            name,
            ctx.pointer(x),
            inner_rows(ctx, x),
            ctx.pointer(cos),
            ctx.pointer(sin),
            form,
            ctx.pointer(op.out),
        )
    ]


def reduction(ctx: Context, op: Op) -> list[str]:
    """sum, mean and max over neighbouring axes; where other axes follow, elements are taken in order."""
    needs(op, DType.F32)
    x, axes = cast(Value, op.args[0]), sorted(op.attr("axes"))
    shape = shape_of(x)
    if not axes or axes != list(range(max(axes[0], 1), axes[-1] + 1)):
        raise refuse(op, f"it reduces axes {axes} of {list(shape)}; there is a kernel for neighbouring ones")
    width, inner = product(shape[axes[0] : axes[-1] + 1]), product(shape[axes[-1] + 1 :])
    rows = inner_rows(ctx, x, len(shape) - axes[0])
    scale = "1.0f" if op.kind != "mean" else f"1.0f / float({size(width)})"
    if axes[-1] != len(shape) - 1:
        name = "fold_rows<true>" if op.kind == "max" else "fold_rows<false>"
        return [call(name, ctx.pointer(x), rows, size(inner), scale, ctx.pointer(op.out))]
    if op.kind == "max":
        return [call("max_rows", ctx.pointer(x), rows, ctx.pointer(op.out))]
    return [call("sum_rows", ctx.pointer(x), rows, scale, ctx.pointer(op.out))]


def along_last(ctx: Context, op: Op) -> list[str]:
    x = cast(Value, op.args[0])
    if op.attr("axis") != tensor_of(x).rank - 1 or (op.kind == "softmax" and dtype_of(x) is not DType.F32):
        raise refuse(op, "there is a kernel for the last axis of f32 values")
    return [call(f"{op.kind}_rows", ctx.pointer(x), inner_rows(ctx, x), ctx.pointer(op.out))]


def matmul(ctx: Context, op: Op) -> list[str]:
    needs(op, DType.F32)
    x, y = cast(Any, op.args[0]), cast(Any, op.args[1])
    a, b, out = shape_of(x), shape_of(y), shape_of(op.out)
    shared = len(b) == 2 or (len(b) == len(a) and b[0] == 1 and a[0] != 1)
    batch = product(a[1:-2])
    if len(a) < 3 or a[0] != out[0] or product(b[:-2] if shared else b[1:-2]) != batch:
        raise refuse(op, f"{list(a)} times {list(b)} is not a product within each token")
    y_ld = "0" if shared else ctx.ld(y)
    sizes = (size(a[0]), batch, a[-2], a[-1], b[-1])
    return [call("matmul_rows", ctx.pointer(x), ctx.ld(x), ctx.pointer(y), y_ld, *sizes, ctx.pointer(op.out))]
