"""The kernel table: for each op kind, how launches of its kernels are printed."""

from __future__ import annotations

from collections.abc import Callable

from codegen.triton import choose, moves, quantize, rows
from codegen.triton.attention import paged_attention
from codegen.triton.context import Context
from codegen.triton.kv_write import kv_seal, kv_write
from codegen.triton.launch import Case
from codegen.triton.linear import linear
from codegen.triton.qlinear import qlinear
from codegen.triton.recurrence import paged_recurrence
from ir.graph import Op

Printer = Callable[[Context, Op], list[Case]]

KERNELS: dict[str, Printer] = {
    "embed": moves.embed,
    "kv_write": kv_write,
    "kv_seal": kv_seal,
    "linear": linear,
    "moe_linear": linear,
    "topk": choose.topk,
    "take_along": choose.take_along,
    "paged_attention": paged_attention,
    "paged_recurrence": paged_recurrence,
    "qlinear": qlinear,
    "qmoe_linear": qlinear,
    "qembed": quantize.qembed,
    "quantize": quantize.quantize,
    "dequantize": quantize.dequantize,
    "rms_norm": rows.norm,
    "layer_norm": rows.norm,
    "rope": rows.rope,
    "take_rows": moves.take,
    "take": moves.take,
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
    "iota": moves.constant,
    "full": moves.constant,
    "dim": moves.constant,
}
