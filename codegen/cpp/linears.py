"""Calls of the kernels that read matrices of weights: linears and lookups in embedding tables."""

from __future__ import annotations

from typing import Any, cast

from codegen.cpp.context import Context, dtype_of, refuse, shape_of
from codegen.cpp.spelling import call, ctype, size
from ir.dims import product
from ir.graph import Arg, Op, Value, Weight
from ir.types import DType
from passes.match import attribute, operand

ACTIVATIONS = {
    "none": "None", "relu": "Relu", "silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh",
    "sigmoid": "Sigmoid", "tanh": "Tanh",
}  # fmt: skip

# Types of a linear's input and weight that have a kernel; f16 weights are packed as f32.
FACTORS = ((DType.F32, DType.F32), (DType.F32, DType.F16), (DType.BF16, DType.BF16))


def flat_rows(ctx: Context, op: Op, arg: Value) -> tuple[str, str]:
    """(rows, row stride) of an operand whose last axis is a row."""
    shape = shape_of(arg)
    if len(shape) == 2:
        return size(shape[0]), ctx.ld(arg)
    if not ctx.is_contiguous(arg):
        raise refuse(op, f"%{arg.name} is a view whose rows are not evenly spaced")
    return size(product(shape[:-1])), size(shape[-1])


def linear(ctx: Context, op: Op) -> list[str]:
    x, w = cast(Value, op.args[0]), cast(Any, op.args[1])
    check_factors(ctx, op)
    rows, ld = flat_rows(ctx, op, x)
    k, n, gated = shape_of(x)[-1], shape_of(op.out)[-1], attribute(op, "gated")
    packed = ctx.weight(w, "paired" if gated else "panels")
    return [
        epilogue(ctx, op, operand(op, 2), cast("Value | None", operand(op, 3))),
        call(
            f"linear<{'true' if gated else 'false'}>",
            ctx.pointer(x), ld, rows, k, n, packed, ctx.scratch(op), "finish",
        ),
    ]  # fmt: skip


def check_factors(ctx: Context, op: Op) -> None:
    """Raises CodegenError where x, operand 0, and the weight, operand 1, have types without a kernel."""
    x, w = (dtype_of(a) for a in op.args[:2])
    if not ctx.is_constant(op.args[1]) or (x, w) not in FACTORS:
        pairs = " or ".join(f"{a} by {b}" for a, b in FACTORS)
        raise refuse(op, f"{x} by {w}; there is {pairs}, where the weight is a constant")


def epilogue(ctx: Context, op: Op, bias: Arg, residual: Value | None) -> str:
    """What a linear does with its sums: bias, activation, gate, residual, and the type that it stores."""
    types = [dtype_of(op.out), DType.F32 if residual is None else dtype_of(residual)]
    if not {DType.F32, DType.BF16}.issuperset(types):
        raise refuse(op, f"a result of {types[0]} and a residual of {types[1]}; there are f32 and bf16")
    r_ld = "0" if residual is None else flat_rows(ctx, op, residual)[1]
    name = ", ".join((ACTIVATIONS[attribute(op, "activation")], *map(ctype, types)))
    n = shape_of(op.out)[-1]
    fields = ", ".join(map(str, (ctx.pointer(op.out), n, ctx.pointer(bias), ctx.pointer(residual), r_ld, n)))
    return f"Epilogue<{name}> finish{{{fields}}};"


def embed(ctx: Context, op: Op) -> list[str]:
    ids, table = cast(Value, op.args[0]), cast(Any, op.args[1])
    if not ctx.is_constant(table) or dtype_of(op.out) is not DType.F32 or not ctx.is_contiguous(ids):
        raise refuse(op, "the table must be a constant, the ids contiguous and the result f32")
    panels = reads_panels(ctx, table)
    vocab, width = shape_of(table)
    pointer = ctx.weight(table, "panels" if panels else "table")
    count = size(product(shape_of(ids)))
    name = "embed_panels" if panels else "embed_rows"
    return [call(name, ctx.pointer(ids), count, pointer, vocab, width, ctx.pointer(op.out))]


def reads_panels(ctx: Context, table: Value | Weight) -> bool:
    """Whether a linear reads the same array, which is then stored once, in its layout."""
    return any(
        op.kind == "linear" and op.args[1] == table and not attribute(op, "gated") for op in ctx.graph.ops
    )
