"""Kernels that compute along rows of a token: norms, rotations, reductions, small products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from codegen.triton.context import Context, literal, needs, refuse, shape_of
from codegen.triton.launch import Arg, Case, Expr, always, cdiv, expression
from codegen.triton.render import render
from codegen.triton.schedule import power_of_two, whole_rows
from ir.dims import product
from ir.graph import Op, Value
from ir.types import DType
from passes.match import attribute, operand

FLOATS = (DType.F32, DType.BF16, DType.F16)


@dataclass(frozen=True)
class Rows:
    """An operand whose last axes are one row: tokens, `ld` elements apart, of `inner` rows of `width`."""

    count: Expr
    ld: int
    inner: int
    width: int

    @staticmethod
    def of(ctx: Context, op: Op, x: Value, rank: int = 1) -> Rows:
        shape = shape_of(x)
        leading = shape[: len(shape) - rank]
        inner, width = product(leading[1:]), product(shape[len(shape) - rank :])
        if not isinstance(inner, int) or not isinstance(width, int):
            raise refuse(op, f"an axis after the first has a symbolic size in {list(shape)}")
        return Rows(expression(product(leading)), ctx.ld(x) if leading else width, inner, width)

    @property
    def start(self) -> str:
        """Where row `row` starts."""
        if self.ld == self.inner * self.width:
            return f"row.to(tl.int64) * {self.width}"
        if self.inner == 1:
            return f"row.to(tl.int64) * {self.ld}"
        head = f" + row % {self.inner} * {self.width}"
        return f"(row // {self.inner}).to(tl.int64) * {self.ld}{head}"


def _row_kernel(
    ctx: Context, rows: Rows, stem: str, args: dict[str, Arg], most: int = 16384, **hooks: object
) -> list[Case]:
    """A launch of a template whose programs take whole rows of `x` to `out`."""
    tile = whole_rows(ctx.device, rows.width, most)
    body = render(stem, rows=rows, looped=tile.block < rows.width, **hooks)
    launch = ctx.launch(
        stem,
        body,
        {**args, "rows": ctx.size(rows.count)},
        (cdiv(rows.count, tile.rows),),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )
    return always(launch)


# --- norms


def norm(ctx: Context, op: Op) -> list[Case]:
    """rms_norm and layer_norm."""
    needs(op, *FLOATS)
    x, rank = cast(Value, op.args[0]), attribute(op, "rank")
    rows = Rows.of(ctx, op, x, rank)
    weights = {name: operand(op, i) for i, name in ((1, "weight"), (2, "bias"))}
    given = {name: cast(Value, w) for name, w in weights.items() if w is not None}
    return _row_kernel(
        ctx,
        rows,
        "norm",
        {name: ctx.pointer(v) for name, v in {"x": x, **given, "out": op.out}.items()},
        centred=op.kind == "layer_norm",
        starts={name: _weight_start(ctx, op, w, rank) for name, w in given.items()},
        eps=literal(float(op.attr("eps"))),
        share=literal(1.0 / rows.width),
    )


def _weight_start(ctx: Context, op: Op, w: Value, rank: int) -> str:
    """Where the weight of row `row` starts: one covers every row, or each of a token's rows has its own."""
    shape, x = shape_of(w), shape_of(op.args[0])
    heads = product(shape[:-rank])
    if shape[-rank:] != x[-rank:] or heads not in (1, product(x[1:-rank])) or not ctx.is_contiguous(w):
        raise refuse(op, f"a weight of shape {list(shape)} does not cover rows of {list(x)}")
    return "0" if heads == 1 else f"row % {heads} * {product(shape[-rank:])}"


# --- rotary embedding


def rope(ctx: Context, op: Op) -> list[Case]:
    needs(op, *FLOATS)
    x, cos, sin = (cast(Value, a) for a in op.args)
    shape, angles = shape_of(x), shape_of(cos)
    rows = Rows.of(ctx, op, x)
    heads = product(angles[1:-1])
    if (
        len(angles) != len(shape)
        or heads not in (1, rows.inner)
        or ctx.ld(cos) != ctx.ld(sin)
        or angles[0] not in (1, shape[0])
    ):
        raise refuse(op, f"cos {list(angles)} does not fit {list(shape)} row by row")
    pairs, offset = cast(int, angles[-1]), attribute(op, "offset")
    interleaved = attribute(op, "interleaved")
    terms = [f"(row // {rows.inner}).to(tl.int64) * {ctx.ld(cos)}"] if angles[0] == shape[0] else []
    terms += [f"row % {rows.inner} * {pairs}"] if heads != 1 else []
    tile = whole_rows(ctx.device, rows.width)
    body = render(
        "rope",
        rows=rows,
        angle=" + ".join(terms) or "row * 0",
        pairs=pairs,
        first=f"{offset} + 2 * pair" if interleaved else f"{offset} + pair",
        partner=1 if interleaved else pairs,
        offset=offset,
        rest=rows.width - 2 * pairs,
    )
    constants = {"ROWS": tile.rows, "PAIRS": power_of_two(pairs)}
    if rows.width > 2 * pairs:
        constants["REST"] = power_of_two(rows.width - 2 * pairs)
    launch = ctx.launch(
        "rope",
        body,
        {
            "x": ctx.pointer(x),
            "cos": ctx.pointer(cos),
            "sin": ctx.pointer(sin),
            "out": ctx.pointer(op.out),
            "rows": ctx.size(rows.count),
        },
        (cdiv(rows.count, tile.rows),),
        constants,
        num_warps=tile.num_warps,
    )
    return always(launch)
