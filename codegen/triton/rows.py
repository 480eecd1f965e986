"""Kernels that compute along rows of a token: norms, rotations, reductions, small products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from codegen.triton.context import FLOATS, TYPES, Context, dtype_of, literal, needs, refuse, shape_of
from codegen.triton.launch import Arg, Case, Expr, always, cdiv, expression
from codegen.triton.render import render
from codegen.triton.schedule import power_of_two, whole_rows
from ir.dims import product
from ir.graph import Op, Value, tensor_of
from ir.types import DType
from passes.match import attribute, operand

WHOLE = (DType.I32, DType.I64)


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
    def token(self) -> str:
        """The token that row `row` is of."""
        return "row" if self.inner == 1 else f"(row // {self.inner})"

    @property
    def start(self) -> str:
        """Where row `row` starts."""
        if self.ld == self.inner * self.width:
            return f"row.to(tl.int64) * {self.width}"
        head = "" if self.inner == 1 else f" + row % {self.inner} * {self.width}"
        return f"{self.token}.to(tl.int64) * {self.ld}{head}"


def _row_kernel(
    ctx: Context, rows: Rows, stem: str, args: dict[str, Arg], template: str, **hooks: object
) -> list[Case]:
    """A launch of a template whose programs take whole rows of `x` to `out`, in parts where they are long."""
    tile = whole_rows(ctx.device, rows.width, 4096 if template == "cumsum" else 16384)
    body = render(template, rows=rows, looped=tile.block < rows.width, **hooks)
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
        op.kind,
        {name: ctx.pointer(v) for name, v in {"x": x, **given, "out": op.out}.items()},
        "norm",
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
    terms = [f"{rows.token}.to(tl.int64) * {ctx.ld(cos)}"] if angles[0] == shape[0] else []
    terms += [f"row % {rows.inner} * {pairs}"] if heads != 1 else []
    tile = whole_rows(ctx.device, rows.width)
    body = render(
        "rope",
        rows=rows,
        angle=" + ".join(terms) or "row * 0",
        pairs=pairs,
        first=(f"{offset} + " if offset else "") + ("2 * pair" if interleaved else "pair"),
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


# --- reductions and scans


def reduction(ctx: Context, op: Op) -> list[Case]:
    """sum, mean and max over neighbouring axes; where other axes follow, elements are taken in order."""
    needs(op, *FLOATS)
    x, axes = cast(Value, op.args[0]), sorted(op.attr("axes"))
    shape = shape_of(x)
    if not axes or axes != list(range(max(axes[0], 1), axes[-1] + 1)):
        raise refuse(op, f"it reduces axes {axes} of {list(shape)}; there is a kernel for neighbouring ones")
    rows, inner = Rows.of(ctx, op, x, len(shape) - axes[0]), product(shape[axes[-1] + 1 :])
    width = product(shape[axes[0] : axes[-1] + 1])
    args = {"x": ctx.pointer(x), "out": ctx.pointer(op.out)}
    share = literal(1.0 / cast(int, width)) if op.kind == "mean" and width else None
    if axes[-1] == len(shape) - 1:
        return _row_kernel(ctx, rows, op.kind, args, "reduce", kind=op.kind, share=share)
    tile = whole_rows(ctx.device, min(cast(int, inner), 128))
    launch = ctx.launch(
        f"fold_{op.kind}",
        render("fold", rows=rows, inner=inner, kind=op.kind, share=share),
        {**args, "rows": ctx.size(rows.count)},
        (cdiv(rows.count, tile.rows), cdiv(cast(int, inner), tile.block)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )
    return always(launch)


def along_last(ctx: Context, op: Op) -> list[Case]:
    """softmax and cumsum."""
    needs(op, *FLOATS, *(WHOLE if op.kind == "cumsum" else ()))
    x = cast(Value, op.args[0])
    if op.attr("axis") != tensor_of(x).rank - 1:
        raise refuse(op, "there is a kernel for the last axis")
    args = {"x": ctx.pointer(x), "out": ctx.pointer(op.out)}
    held = "tl.float32" if dtype_of(x) in FLOATS else TYPES[dtype_of(x)]
    return _row_kernel(ctx, Rows.of(ctx, op, x), op.kind, args, op.kind, held=held)


# --- small products


def matmul(ctx: Context, op: Op) -> list[Case]:
    """A product within each token: x [T, .., M, K] times y [T or nothing, .., K, N]."""
    needs(op, *FLOATS)
    x, y = cast(Value, op.args[0]), cast(Value, op.args[1])
    a, b, out = shape_of(x), shape_of(y), shape_of(op.out)
    shared = len(b) == 2 or (len(b) == len(a) and b[0] == 1 and a[0] != 1)
    batch = product(a[1:-2])
    if len(a) < 3 or a[0] != out[0] or product(b[:-2] if shared else b[1:-2]) != batch:
        raise refuse(op, f"{list(a)} times {list(b)} is not a product within each token")
    rows, width = Rows.of(ctx, op, x), cast(int, b[-1])
    tile = whole_rows(ctx.device, min(width, 128))
    factor = [] if shared else [f"{rows.token}.to(tl.int64) * {ctx.ld(y)}"]
    factor += [] if batch == 1 else [f"row // {a[-2]} % {batch} * {rows.width * width}"]
    launch = ctx.launch(
        "matmul",
        render("matmul", rows=rows, factor=" + ".join(factor) or "row * 0", width=width),
        {"x": ctx.pointer(x), "y": ctx.pointer(y), "out": ctx.pointer(op.out), "rows": ctx.size(rows.count)},
        (cdiv(rows.count, tile.rows), cdiv(width, tile.block)),
        {"ROWS": tile.rows, "BLOCK": tile.block},
        num_warps=tile.num_warps,
    )
    return always(launch)
