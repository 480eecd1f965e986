"""Linear: act(x @ w.T + bias) times the up half where gated, plus a residual, in one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from codegen.triton.context import FLOATS, Context, dtype_of, needs, refuse, shape_of
from codegen.triton.launch import Arg, Case, Expr, Launch, cdiv, expression, times
from codegen.triton.render import render
from codegen.triton.tiles import LinearTile, linear_tiles
from ir.dims import product
from ir.graph import Op, Value, Weight
from ir.types import DType
from passes.match import attribute, operand


@dataclass(frozen=True)
class _Sizes:
    """y is [rows, n], and K is summed over."""

    rows: Expr
    n: int
    k: int


def linear(ctx: Context, op: Op) -> list[Case]:
    """A launch for each range of rows that has a tile of its own."""
    needs(op, *FLOATS)
    sizes = _sizes(op)
    args = _operands(ctx, op, sizes)
    tiles = linear_tiles(
        ctx.device, sizes.n, sizes.k, gated=attribute(op, "gated"), wide=_is_wide(ctx, op),
        aligned=all(args[name].aligned for name in ("x", "w", "K", "x_ld", "w_ld")), invariant=ctx.invariant,
    )  # fmt: skip
    if isinstance(sizes.rows, int):
        rows = sizes.rows
        tiles = [(None, next(tile for most, tile in tiles if most is None or rows <= most))]
    return [
        Case((linear_launch(ctx, op, tile),), None if most is None else (sizes.rows, most))
        for most, tile in tiles
    ]


def linear_launch(ctx: Context, op: Op, tile: LinearTile) -> Launch:
    """The launch of a tile's kernel. N and K are numbers that it is given, so that layers share it."""
    sizes, wide = _sizes(op), _is_wide(ctx, op)
    gated, activation = attribute(op, "gated"), attribute(op, "activation")
    bias, residual = (cast("Value | Weight | None", operand(op, i)) for i in (2, 3))
    ends = [activation] * (activation != "none") + ["gated"] * gated
    ends += ["bias"] * (bias is not None) + ["residual"] * (residual is not None)
    body = render(
        "linear",
        gated=gated, activation=activation, bias=bias is not None, residual=residual is not None,
        precision=ctx.device.dot_f32 if wide else "ieee",
        widen_x=_widening(wide, dtype_of(op.args[0])), widen_w=_widening(wide, dtype_of(op.args[1])),
    )  # fmt: skip
    constants = {
        "BLOCK_M": tile.m,
        "BLOCK_N": tile.n,
        "BLOCK_K": tile.k,
        "GROUP": tile.group,
        "PARTS": tile.parts,
        "CLAMPED": tile.clamped,
        "EVEN_N": sizes.n % tile.n == 0,
        "EVEN_K": sizes.k % tile.k == 0,
    }
    return ctx.launch(
        "_".join(["linear", *ends]),
        body,
        _operands(ctx, op, sizes),
        (times(cdiv(sizes.rows, tile.m), cdiv(sizes.n, tile.n)),),
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _operands(ctx: Context, op: Op, sizes: _Sizes) -> dict[str, Arg]:
    x, w, bias, residual = (cast("Value | Weight | None", operand(op, i)) for i in range(4))
    assert x is not None and w is not None
    args = {"x": ctx.pointer(x), "w": ctx.pointer(w)}
    args |= {} if bias is None else {"bias": ctx.pointer(bias)}
    args |= {} if residual is None else {"residual": ctx.pointer(residual)}
    args |= {"out": ctx.pointer(op.out), "rows": ctx.size(sizes.rows), "N": ctx.size(sizes.n)}
    args |= {"K": ctx.size(sizes.k), "x_ld": ctx.size(row_stride(ctx, op, x)), "w_ld": ctx.size(ctx.ld(w))}
    return args | ({} if residual is None else {"residual_ld": ctx.size(row_stride(ctx, op, residual))})


def _sizes(op: Op) -> _Sizes:
    (*outer, n), k = shape_of(op.out), shape_of(op.args[0])[-1]
    n, k = expression(n), expression(k)
    if not isinstance(n, int) or not isinstance(k, int):
        raise refuse(op, f"a row of {k} or of {n} elements; only the number of rows may depend on a step")
    return _Sizes(expression(product(tuple(outer))), n, k)


def _is_wide(ctx: Context, op: Op) -> bool:
    """Whether the factors are multiplied as f32, to which the narrower one is then widened.

    The interpreter multiplies f32 alone.
    """
    types = {dtype_of(arg) for arg in op.args[:2]}
    return ctx.device.interpreted or len(types) > 1 or DType.F32 in types


def _widening(wide: bool, dtype: DType) -> str:
    return ".to(tl.float32)" if wide and dtype is not DType.F32 else ""


def row_stride(ctx: Context, op: Op, arg: Value | Weight) -> int:
    """Elements from one row, of the last axis, to the next."""
    *outer, width = shape_of(arg)
    if len(outer) == 0 or product(tuple(outer[1:])) == 1:
        return ctx.ld(arg)
    if not ctx.is_contiguous(arg):
        raise refuse(op, f"%{arg.name} is a view whose rows are not evenly spaced")
    return cast(int, expression(width))
