"""Calls of the kernels that move elements: gathers, cuts, joins and permutations that are no views."""

from __future__ import annotations

from typing import Any, cast

from codegen.cpp.context import Context, dtype_of, refuse, shape_of
from codegen.cpp.spelling import call, size
from ir.dims import Dim, product
from ir.graph import Op, Value
from ir.types import DType
from passes.match import attribute


def take_rows(ctx: Context, op: Op) -> list[str]:
    x, rows = cast(Value, op.args[0]), cast(Value, op.args[1])
    if op.kind == "take" and op.attr("axis") != 0:
        return _take_columns(ctx, op, x, rows)
    width, count = size(product(shape_of(x)[1:])), size(product(shape_of(rows)))
    y = ctx.pointer(op.out)
    return [call("take_rows", ctx.pointer(x), ctx.ld(x), width, ctx.pointer(rows), count, y, width)]


def _take_columns(ctx: Context, op: Op, x: Value, columns: Value) -> list[str]:
    shape = shape_of(x)
    if len(shape) != 2 or len(shape_of(columns)) != 1 or dtype_of(x) is not DType.F32:
        raise refuse(op, "it gathers along an axis after the first, and not columns of f32")
    source = (ctx.pointer(x), ctx.ld(x), size(shape[0]), size(shape[1]))
    return [
        call("take_columns", *source, ctx.pointer(columns), size(shape_of(columns)[0]), ctx.pointer(op.out))
    ]


def _static(op: Op, shape: tuple[Dim, ...]) -> tuple[int, ...]:
    if not all(isinstance(d, int) for d in shape):
        raise refuse(op, f"an axis after the first has a symbolic size in {list(shape)}")
    return cast("tuple[int, ...]", shape)


def _copy(ctx: Context, op: Op, x: Any, start: int, target: Value, to: int, axis: int, count: int) -> str:
    """Copies `count` of an axis (not the first) of x from `start` to the target's `to`."""
    _static(op, shape_of(x)[1:])
    pre, post = cast(int, product(shape_of(x)[1:axis])), cast(int, product(shape_of(x)[axis + 1 :]))
    x_step, y_step = (cast(int, shape_of(v)[axis]) * post for v in (x, target))
    source = (f"{ctx.pointer(x)} + {start * post}", ctx.ld(x), x_step)
    result = (f"{ctx.pointer(target)} + {to * post}", ctx.ld(target), y_step)
    return call("copy_parts", *source, *result, size(shape_of(x)[0]), pre, count * post)


def concat(ctx: Context, op: Op) -> list[str]:
    axis, lines, at = op.attr("axis"), [], cast(Any, 0)
    for x in op.args:
        count = cast(Any, shape_of(x)[axis])
        if axis == 0:
            width = size(product(shape_of(x)[1:]))
            y = f"{ctx.pointer(op.out)} + {size(at)} * {width}"
            lines.append(call("copy_parts", ctx.pointer(x), ctx.ld(x), 0, y, width, 0, size(count), 1, width))
        else:
            lines.append(_copy(ctx, op, x, 0, op.out, at, axis, count))
        at = at + count
    return lines


def split(ctx: Context, op: Op) -> list[str]:
    x, axis, start, lines = op.args[0], op.attr("axis"), 0, []
    if axis == 0:
        raise refuse(op, "it cuts the first axis")
    for out, count in zip(op.outs, op.attr("sizes"), strict=True):
        if ctx.places[out.name].root == out.name:
            lines.append(_copy(ctx, op, x, start, out, 0, axis, count))
        start += count
    return lines


def slice_(ctx: Context, op: Op) -> list[str]:
    x, axis, start, step = cast(Value, op.args[0]), op.attr("axis"), op.attr("start"), attribute(op, "step")
    if axis == 0:
        raise refuse(op, "it cuts the first axis")
    if step == 1:
        return [_copy(ctx, op, x, start, op.out, 0, axis, op.attr("stop") - start)]
    shape = _static(op, shape_of(x)[1:])
    strides = [cast(int, product(shape[i + 1 :])) for i in range(len(shape))]
    offset = start * strides[axis - 1]
    strides[axis - 1] *= step
    return [_permute(ctx, op, x, offset, _static(op, shape_of(op.out)[1:]), strides)]


def transpose(ctx: Context, op: Op) -> list[str]:
    x, perm = cast(Value, op.args[0]), op.attr("perm")
    if perm[0] != 0:
        raise refuse(op, "it moves the first axis")
    shape = _static(op, shape_of(x)[1:])
    strides = [cast(int, product(shape[i + 1 :])) for i in range(len(shape))]
    return [
        _permute(ctx, op, x, 0, tuple(shape[p - 1] for p in perm[1:]), [strides[p - 1] for p in perm[1:]])
    ]


def _permute(ctx: Context, op: Op, x: Value, offset: int, shape: tuple[int, ...], strides: list[int]) -> str:
    if len(shape) > 4:
        raise refuse(op, "it has more than five axes")
    sizes = (1,) * (4 - len(shape)) + shape
    steps = [0] * (4 - len(strides)) + strides
    braced = [f"{{{', '.join(map(str, v))}}}" for v in (sizes, steps)]
    source = (f"{ctx.pointer(x)} + {offset}", ctx.ld(x))
    return call("permute", *source, ctx.pointer(op.out), size(shape_of(x)[0]), *braced)


def reshape(ctx: Context, op: Op) -> list[str]:
    x, y = cast(Value, op.args[0]), ctx.pointer(op.out)
    rows, width = size(shape_of(x)[0]), size(product(shape_of(x)[1:]))
    return [call("copy_parts", ctx.pointer(x), ctx.ld(x), 0, y, width, 0, rows, 1, width)]
