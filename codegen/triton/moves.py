"""Kernels that move elements: gathers, cuts, joins and permutations that are no views, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from codegen.triton.context import Context, dtype_of, literal, refuse, shape_of
from codegen.triton.launch import Case, Launch, always, cdiv, expression
from codegen.triton.pointwise import Array, Tile, launch_loop
from codegen.triton.render import render
from codegen.triton.schedule import row_tile
from ir.dims import Dim, product
from ir.graph import Op, Value
from passes.match import attribute

MOST_JOINED = 8  # operands of a concat in one kernel


def embed(ctx: Context, op: Op) -> list[Case]:
    """out[i] = table[ids[i]]."""
    return _gather(ctx, op, op.args[1], op.args[0])


def take(ctx: Context, op: Op) -> list[Case]:
    """out[i] = x[indices[i]]."""
    if op.kind == "take" and op.attr("axis") != 0:
        return _columns(ctx, op, op.args[0], op.args[1])
    return _gather(ctx, op, op.args[0], op.args[1])


def _columns(ctx: Context, op: Op, x: Any, columns: Any) -> list[Case]:
    """out[t, i] = x[t, columns[i]]."""
    shape = shape_of(x)
    if len(shape) != 2 or len(shape_of(columns)) != 1 or not ctx.is_contiguous(columns):
        raise refuse(op, "it gathers along an axis after the first, and not columns")
    width, count = _static(op, (shape[1], shape_of(columns)[0]))
    rows, tile = expression(shape[0]), row_tile(ctx.device, count)
    launch = ctx.launch(
        "take_columns",
        render("take_columns", width=width, count=count, ld=ctx.ld(x), outside=outside(x)),
        {
            "x": ctx.pointer(x),
            "columns": ctx.pointer(columns),
            "out": ctx.pointer(op.out),
            "rows": ctx.size(rows),
        },
        (cdiv(rows, tile.rows), cdiv(count, tile.block)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )
    return always(launch)


def outside(x: Any) -> str:
    """What an index out of bounds gives."""
    return 'float("nan")' if dtype_of(x).is_float else "0"


def _gather(ctx: Context, op: Op, x: Any, indices: Any) -> list[Case]:
    if not ctx.is_contiguous(indices):
        raise refuse(op, f"%{indices.name} is a view whose elements are not side by side")
    width = cast(int, product(_static(op, shape_of(x)[1:])))
    count = expression(product(shape_of(indices)))
    tile = row_tile(ctx.device, width)
    launch = ctx.launch(
        op.kind,
        render("take", width=width, ld=ctx.ld(x), outside=outside(x)),
        {
            "x": ctx.pointer(x),
            "indices": ctx.pointer(indices),
            "out": ctx.pointer(op.out),
            "size": ctx.size(shape_of(x)[0]),
            "rows": ctx.size(count),
        },
        (cdiv(count, tile.rows), cdiv(width, tile.block)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )
    return always(launch)


def _static(op: Op, shape: Sequence[Dim]) -> tuple[int, ...]:
    if not all(isinstance(d, int) for d in shape):
        raise refuse(op, f"an axis after the first has a symbolic size in {list(shape)}")
    return cast("tuple[int, ...]", tuple(shape))


def _strides(shape: Sequence[int]) -> list[int]:
    """Of contiguous elements."""
    return [cast(int, product(tuple(shape[i + 1 :]))) for i in range(len(shape))]


def copy(ctx: Context, shape: Sequence[Dim], source: Array, target: Array) -> list[Case]:
    def steps(tile: Tile) -> list[str]:
        return [tile.store("out", tile.load("x"))]

    return launch_loop(ctx, "copy", shape, {"x": source, "out": target}, steps)


def _range(
    ctx: Context, op: Op, x: Any, start: int, target: Value, to: int, axis: int, count: int
) -> list[Case]:
    """Copies `count` of an axis (not the first) of x from `start` to the target's `to`."""
    shape = list(_static(op, shape_of(x)[1:]))

    def part(value: Value, first: int) -> Array:
        strides = _strides(_static(op, shape_of(value)[1:]))
        return Array(ctx.pointer(value), ctx.ld(value), tuple(strides), first * strides[axis - 1])

    shape[axis - 1] = count
    return copy(ctx, (shape_of(x)[0], *shape), part(x, start), part(target, to))


def _together(cases: Sequence[list[Case]]) -> list[Case]:
    """One case of launches that are needed whatever the step."""
    return always(*(launch for case in cases for launch in case[0].launches))


def concat(ctx: Context, op: Op) -> list[Case]:
    axis, xs = op.attr("axis"), [cast(Value, arg) for arg in op.args]
    if axis == 0:
        return _stacked(ctx, op, xs)
    launches: list[Launch] = []
    blocks = cast(int, product(_static(op, shape_of(op.out)[1:axis])))
    start = 0  # in one of the result's blocks
    for first in range(0, len(xs), MOST_JOINED):
        some = xs[first : first + MOST_JOINED]
        launches.append(_joined(ctx, op, some, axis, blocks, start))
        start += sum(_block(op, x, axis) for x in some)
    return always(*launches)


def _block(op: Op, x: Value, axis: int) -> int:
    """Elements of an axis and of those after it."""
    return cast(int, product(_static(op, shape_of(x)[axis:])))


def _joined(ctx: Context, op: Op, xs: Sequence[Value], axis: int, blocks: int, start: int) -> Launch:
    """Some operands into the result's blocks, from `start` in each."""
    parts: list[dict[str, int]] = []
    width = 0
    for x in xs:
        parts.append({"start": width, "width": _block(op, x, axis), "ld": ctx.ld(x)})
        width += _block(op, x, axis)
    rows, tile = expression(shape_of(op.out)[0]), row_tile(ctx.device, blocks * width)
    whole = {"out_ld": ctx.ld(op.out), "out_width": _block(op, op.out, axis)}
    pointers = {f"x{i}": ctx.pointer(x) for i, x in enumerate(xs)}
    return ctx.launch(
        "concat",
        render("concat", parts=parts, width=width, blocks=blocks, start=start, **whole),
        {**pointers, "out": ctx.pointer(op.out), "rows": ctx.size(rows)},
        (cdiv(rows, tile.rows), cdiv(blocks * width, tile.block)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )


def _stacked(ctx: Context, op: Op, xs: Sequence[Value]) -> list[Case]:
    """Rows below rows: one copy for each operand."""
    cases: list[list[Case]] = []
    width = cast(int, product(_static(op, shape_of(op.out)[1:])))
    at = cast(Any, 0)
    for x in xs:
        target = Array(ctx.pointer(op.out, at * width), width, (1,))
        cases.append(contiguous(ctx, x, target))
        at = at + shape_of(x)[0]
    return _together(cases)


def split(ctx: Context, op: Op) -> list[Case]:
    x, axis, start, parts = op.args[0], op.attr("axis"), 0, []
    if axis == 0:
        raise refuse(op, "it cuts the first axis")
    for out, count in zip(op.outs, op.attr("sizes"), strict=True):
        if ctx.places[out.name].root == out.name:
            parts.append(_range(ctx, op, x, start, out, 0, axis, count))
        start += count
    return _together(parts)


def slice_(ctx: Context, op: Op) -> list[Case]:
    x, axis = cast(Value, op.args[0]), op.attr("axis")
    if axis == 0:
        raise refuse(op, "it cuts the first axis")
    strides = _strides(_static(op, shape_of(x)[1:]))
    start = op.attr("start") * strides[axis - 1]
    strides[axis - 1] *= attribute(op, "step")
    return _gathered(ctx, op, strides, start)


def transpose(ctx: Context, op: Op) -> list[Case]:
    x, perm = cast(Value, op.args[0]), op.attr("perm")
    if perm[0] != 0:
        raise refuse(op, "it moves the first axis")
    strides = _strides(_static(op, shape_of(x)[1:]))
    return _gathered(ctx, op, [strides[p - 1] for p in perm[1:]], 0)


def _gathered(ctx: Context, op: Op, strides: Sequence[int], start: int) -> list[Case]:
    """The result's elements, which lie `strides` apart in the operand."""
    x = cast(Value, op.args[0])
    own = _strides(_static(op, shape_of(op.out)[1:]))
    source = Array(ctx.pointer(x), ctx.ld(x), tuple(strides), start)
    return copy(ctx, shape_of(op.out), source, Array(ctx.pointer(op.out), ctx.ld(op.out), tuple(own)))


def contiguous(ctx: Context, x: Value, target: Array) -> list[Case]:
    """The rows of x side by side."""
    shape = (shape_of(x)[0], product(shape_of(x)[1:])) if shape_of(x) else (1, 1)
    return copy(ctx, shape, Array(ctx.pointer(x), ctx.ld(x), (1,)), target)


def reshape(ctx: Context, op: Op) -> list[Case]:
    x = cast(Value, op.args[0])
    width = cast(int, product(_static(op, shape_of(x)[1:])))
    return contiguous(ctx, x, Array(ctx.pointer(op.out), width, (1,)))


def constant(ctx: Context, op: Op) -> list[Case]:
    """iota, full and dim whose size is only known at run time."""
    count, out = product(shape_of(op.out)), Array(ctx.pointer(op.out), 1, ())
    arrays = {"out": out}
    # By way of f32: the interpreter has none from i64 to bf16.
    widened = ".to(tl.float32)" if dtype_of(op.out).is_float else ""
    if op.kind == "dim":
        value = Array(ctx.size(op.attr("size")), 0, ())
        return launch_loop(
            ctx, "dim", (1,), {"value": value, **arrays}, lambda tile: [tile.store("out", f"value{widened}")]
        )
    if op.kind == "iota":
        return launch_loop(ctx, "iota", (count,), arrays, lambda tile: [tile.store("out", f"row{widened}")])
    value = op.attr("value")
    number = literal(float(value)) if dtype_of(op.out).is_float else literal(value)
    return launch_loop(ctx, "full", (count,), arrays, lambda tile: [tile.store("out", number)])
