"""The kernel table: for each op kind, how a call of its kernel is printed.

A printer gives statements of `forward()`, which every thread runs.
"""

from __future__ import annotations

from collections.abc import Callable

from codegen.cpp import experts, kv, linears, moves, qlinears, recurrence, rows
from codegen.cpp.context import Context, dtype_of, shape_of
from codegen.cpp.spelling import call, ctype, literal, size
from ir.dims import product
from ir.graph import Op

Printer = Callable[[Context, Op], list[str]]


def constant(ctx: Context, op: Op) -> list[str]:
    """iota, full and dim whose size is only known at run time."""
    dtype = dtype_of(op.out)
    count = size(product(shape_of(op.out)))
    if op.kind == "iota":
        return [call("iota", ctx.pointer(op.out), count)]
    value = (
        literal(op.attr("value"), dtype) if op.kind == "full" else f"{ctype(dtype)}({size(op.attr('size'))})"
    )
    return [call(f"fill<{ctype(dtype)}>", ctx.pointer(op.out), count, value)]


KERNELS: dict[str, Printer] = {
    "linear": linears.linear,
    "embed": linears.embed,
    "qlinear": qlinears.qlinear,
    "qembed": qlinears.qembed,
    "topk": experts.topk,
    "take_along": experts.take_along,
    "moe_linear": experts.moe_linear,
    "qmoe_linear": experts.qmoe_linear,
    "quantize": qlinears.quantize,
    "dequantize": qlinears.dequantize,
    "rms_norm": rows.norm,
    "layer_norm": rows.norm,
    "rope": rows.rope,
    "kv_write": kv.kv_write,
    "kv_seal": kv.kv_seal,
    "paged_attention": kv.paged_attention,
    "paged_recurrence": recurrence.paged_recurrence,
    "take_rows": moves.take_rows,
    "take": moves.take_rows,
    "concat": moves.concat,
    "split": moves.split,
    "slice": moves.slice_,
    "transpose": moves.transpose,
    "reshape": moves.reshape,
    "sum": rows.reduction,
    "mean": rows.reduction,
    "max": rows.reduction,
    "softmax": rows.along_last,
    "cumsum": rows.along_last,
    "matmul": rows.matmul,
    "iota": constant,
    "full": constant,
    "dim": constant,
}
