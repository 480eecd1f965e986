"""Calls of the kernels of quantised values: linears, lookups in tables, and codes on their own."""

from __future__ import annotations

from typing import Any, cast

from codegen.cpp.context import Context, dtype_of, refuse, shape_of
from codegen.cpp.linears import epilogue, flat_rows
from codegen.cpp.quantized import CODES, Matrix
from codegen.cpp.spelling import call, size, stored_ctype
from ir.dims import product
from ir.graph import Op, Value, Weight
from ir.types import DType
from passes.match import attribute, operand, operand_named

GRIDS = {None: "Exact", "i8": "Int8", "f8e4m3": "Float8"}
STEP = 8  # groups along K have a multiple of
FLOATS = (DType.F32, DType.BF16)


def qlinear(ctx: Context, op: Op) -> list[str]:
    x, gated = cast(Value, op.args[0]), attribute(op, "gated")
    if dtype_of(x) not in FLOATS:
        raise refuse(op, f"an x of {dtype_of(x)}; there are {' and '.join(FLOATS)}")
    matrix = matrix_of(ctx, op)
    rows, ld = flat_rows(ctx, op, x)
    name, grid = "qlinear", ""
    if not in_integers(op):
        name, grid = "qlinear_float", f", {GRIDS[attribute(op, 'x_dtype')]}"
    return [
        epilogue(ctx, op, operand(op, 5), cast("Value | None", operand(op, 6))),
        call(
            f"{name}<{'true' if gated else 'false'}{grid}>", ctx.pointer(x), ld, rows, shape_of(op.out)[-1],
            spelled(ctx, matrix, "paired" if gated else "panels"), attribute(op, "x_group_size"),
            ctx.scratch(op), "finish",
        ),
    ]  # fmt: skip


def in_integers(op: Op) -> bool:
    """Whether a linear multiplies codes; else it multiplies the floats that they stand for."""
    codes, zeros = dtype_of(op.args[1]), operand_named(op, "zero")
    zero = attribute(op, "zero") if zeros is None else 0
    x_group = attribute(op, "x_group_size")
    if attribute(op, "x_dtype") != "i8" or codes is DType.F8E4M3 or x_group % STEP:
        return False
    return 0 <= zero < 16 if codes is DType.U4 else abs(zero) < 256


def qembed(ctx: Context, op: Op) -> list[str]:
    ids = cast(Value, op.args[0])
    if dtype_of(op.out) not in FLOATS or not ctx.is_contiguous(ids):
        raise refuse(op, "the ids must be contiguous and the result f32 or bf16")
    matrix = matrix_of(ctx, op)
    table = spelled(ctx, matrix, "panels")
    count = size(product(shape_of(ids)))
    return [call("qembed", ctx.pointer(ids), count, table, matrix.shape[0], ctx.pointer(op.out))]


def matrix_of(ctx: Context, op: Op) -> Matrix:
    """Codes and what scales them. Raises CodegenError where they are not constants, or not packed."""
    q, scale, zero, offset = (cast(Any, operand_named(op, n)) for n in ("q", "scale", "zero", "offset"))
    if not all(ctx.is_constant(part) for part in (q, scale, zero, offset) if part is not None):
        raise refuse(op, "codes and scales of a matrix must be constants")
    group_size = attribute(op, "group_size")
    if dtype_of(q) not in CODES:
        raise refuse(op, f"codes of {dtype_of(q)}; there are {', '.join(CODES)}")
    if group_size % STEP and group_size < shape_of(q)[1]:
        raise refuse(op, f"groups of {group_size} elements; there are those of a multiple of {STEP}")
    whole = group_size >= cast(int, shape_of(q)[1])
    return Matrix(q, scale, zero, offset, 0 if whole else group_size, attribute(op, "zero"))


def spelled(ctx: Context, matrix: Matrix, layout: str, experts: int = 1) -> str:
    types = ("No" if kind is None else stored_ctype(kind) for kind in matrix.kinds)
    kind = ", ".join((f"Codes::{CODES[matrix.dtype]}", *types))
    n, k = matrix.shape
    data = ctx.matrix(matrix, layout, experts)
    return f"Matrix<{kind}>{{{data}, {k}, {matrix.group_size}, {matrix.kept_zero}}}"


def quantize(ctx: Context, op: Op) -> list[str]:
    x, (q, scale) = cast(Value, op.args[0]), op.outs
    if dtype_of(x) not in FLOATS:
        raise refuse(op, f"an x of {dtype_of(x)}; there are {' and '.join(FLOATS)}")
    rows, ld = flat_rows(ctx, op, x)
    sizes = shape_of(x)[-1], attribute(op, "group_size")
    return [call("quantize_groups", ctx.pointer(x), ld, rows, *sizes, ctx.pointer(q), ctx.pointer(scale))]


def dequantize(ctx: Context, op: Op) -> list[str]:
    parts = [cast("Value | Weight | None", operand(op, i)) for i in range(4)]
    q, _, zeros, _ = parts
    if dtype_of(op.args[0]) not in (DType.I8, DType.F8E4M3, DType.U8) or dtype_of(op.out) not in FLOATS:
        raise refuse(op, f"codes of {dtype_of(op.args[0])} as {dtype_of(op.out)}")
    if any(isinstance(part, Value) and not ctx.is_contiguous(part) for part in parts):
        raise refuse(op, "codes and scales must be contiguous")
    scales, zeros, offsets = (_plain(ctx, part) for part in parts[1:])
    *rows, k = shape_of(op.out)
    sizes = size(product(tuple(rows))), k, attribute(op, "group_size")
    numbers = scales, zeros, attribute(op, "zero"), offsets
    return [call("dequantize_groups", ctx.pointer(q), *sizes, *numbers, ctx.pointer(op.out))]


def _plain(ctx: Context, part: Value | Weight | None) -> str:
    return "(const float*)nullptr" if part is None else ctx.pointer(part)
