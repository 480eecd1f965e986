"""The kernel table: for each op kind, how a call of its kernel is printed.

A printer gives statements of `forward()`, which every thread runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from codegen.cpp import moves, rows
from codegen.cpp.context import Context, dtype_of, refuse, shape_of
from codegen.cpp.spelling import call, ctype, literal, size
from codegen.kv_block import BLOCKS, block_bytes, keys_in_lanes, stream_offsets
from ir.dims import product
from ir.graph import Op, Value, Weight
from ir.types import KV, DType
from passes.match import attribute, operand

Printer = Callable[[Context, Op], list[str]]

ACTIVATIONS = {
    "none": "None", "relu": "Relu", "silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh",
    "sigmoid": "Sigmoid", "tanh": "Tanh",
}  # fmt: skip

# Types of a linear's input and weight that have a kernel; f16 weights are packed as f32.
FACTORS = ((DType.F32, DType.F32), (DType.F32, DType.F16), (DType.BF16, DType.BF16))


def _flat_rows(ctx: Context, op: Op, arg: Value) -> tuple[str, str]:
    """(rows, row stride) of an operand whose last axis is a row."""
    shape = shape_of(arg)
    if len(shape) == 2:
        return size(shape[0]), ctx.ld(arg)
    if not ctx.is_contiguous(arg):
        raise refuse(op, f"%{arg.name} is a view whose rows are not evenly spaced")
    return size(product(shape[:-1])), size(shape[-1])


def linear(ctx: Context, op: Op) -> list[str]:
    x, w = cast(Value, op.args[0]), cast(Any, op.args[1])
    if not ctx.is_constant(w) or (dtype_of(x), dtype_of(w)) not in FACTORS:
        pairs = " or ".join(f"{a} by {b}" for a, b in FACTORS)
        raise refuse(op, f"{dtype_of(x)} by {dtype_of(w)}; there is {pairs}, where the weight is a constant")
    rows, ld = _flat_rows(ctx, op, x)
    k, n, gated = shape_of(x)[-1], shape_of(op.out)[-1], attribute(op, "gated")
    packed = ctx.weight(w, "paired" if gated else "panels")
    return [
        _epilogue(ctx, op),
        call(
            f"linear<{'true' if gated else 'false'}>",
            ctx.pointer(x), ld, rows, k, n, packed, ctx.scratch(op), "finish",
        ),
    ]  # fmt: skip


def _epilogue(ctx: Context, op: Op) -> str:
    """What a linear does with its sums: bias, activation, gate, residual, and the type that it stores."""
    bias, residual = operand(op, 2), cast("Value | None", operand(op, 3))
    types = [dtype_of(op.out), DType.F32 if residual is None else dtype_of(residual)]
    if not {DType.F32, DType.BF16}.issuperset(types):
        raise refuse(op, f"a result of {types[0]} and a residual of {types[1]}; there are f32 and bf16")
    r_ld = "0" if residual is None else _flat_rows(ctx, op, residual)[1]
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


def _check_block(op: Op, kv: KV) -> None:
    if kv.block not in BLOCKS:
        raise refuse(op, f"blocks of {kv.block} tokens; there are those of {', '.join(map(str, BLOCKS))}")


def kv_write(ctx: Context, op: Op) -> list[str]:
    kv, group = cast(KV, cast(Value, op.args[0]).type), ctx.kv_group[op.out.name]
    _check_block(op, kv)
    offsets, layer_bytes = stream_offsets(kv)
    data, slots = f"(char*)s.groups[{group}].data", ctx.pointer(op.args[-1])
    lines: list[str] = []
    for index, (stream, x) in enumerate(zip(kv.streams, op.args[1:-1], strict=True)):
        if dtype_of(x) is not DType.F32 or stream.dtype not in (DType.F32, DType.BF16):
            raise refuse(op, f"stream {stream.name} of {stream.dtype} from {dtype_of(x)}")
        keys = "true" if keys_in_lanes(kv, index) else "false"
        name = f"kv_write<{keys}, {kv.block}, {ctype(stream.dtype)}>"
        place = (block_bytes(kv), op.attr("layer") * layer_bytes + offsets[index])
        lines.append(
            call(name, ctx.pointer(x), ctx.ld(x), "T", stream.heads, stream.head_size, slots, data, *place)
        )
    return lines


def paged_attention(ctx: Context, op: Op) -> list[str]:
    q, state = cast(Value, op.args[0]), cast(Value, op.args[1])
    sinks, slopes = operand(op, 5), operand(op, 6)
    tables = op.args[7:]
    kv, group = cast(KV, state.type), ctx.kv_group[state.name]
    if dtype_of(op.out) not in (DType.F32, DType.BF16):
        raise refuse(op, f"a result of {dtype_of(op.out)}; there are f32 and bf16")
    _check_block(op, kv)
    if not keys_in_lanes(kv, 0) or dtype_of(q) is not DType.F32:
        raise refuse(op, "the first stream must be k and the queries f32")
    key, value = kv.streams[0], kv.streams[1]
    if {key.dtype, value.dtype} - {DType.F32, DType.BF16} or key.heads != value.heads:
        raise refuse(op, f"streams of {key.dtype} and {value.dtype}, {key.heads} and {value.heads} heads")
    offsets, layer_bytes = stream_offsets(kv)
    base = op.attr("layer") * layer_bytes
    mask = ctx.mask(op.attr("mask"), tuple(int(cast(Any, shape_of(t)[1])) for t in tables))
    scale, softcap = (literal(float(attribute(op, n)), DType.F32) for n in ("scale", "softcap"))
    out = ctype(dtype_of(op.out))
    sizes = f"{key.head_size}, {value.head_size}, {kv.block}"
    types = f"{out}, {ctype(key.dtype)}, {ctype(value.dtype)}, {sizes}, {mask}"
    where = f"s.groups[{group}]"
    return [
        f"Cache cache{{(const char*){where}.data, {block_bytes(kv)},",
        f"            {base + offsets[0]}, {base + offsets[1]}, {where}.table, {where}.table_stride}};",
        f"AttentionArgs<{out}> args{{{ctx.pointer(q)}, {ctx.ld(q)}, {ctx.pointer(op.out)}, {ctx.ld(op.out)},",
        f"                   {shape_of(q)[1]}, {key.heads}, {scale}, {softcap},",
        f"                   {ctx.pointer(sinks)}, {ctx.pointer(slopes)},",
        f"                   cache, s.lens, s.starts, R, {ctx.scratch(op)}}};",
        f"{mask} mask{{{', '.join(ctx.pointer(t) for t in tables)}}};",
        f"Attention<{types}>(args, mask).run(th);",
    ]


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
    "linear": linear,
    "embed": embed,
    "rms_norm": rows.norm,
    "layer_norm": rows.norm,
    "rope": rows.rope,
    "kv_write": kv_write,
    "paged_attention": paged_attention,
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
