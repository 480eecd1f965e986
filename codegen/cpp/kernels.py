"""The kernel table: for each op kind, how a call of its kernel is printed.

A printer gives statements of `forward()`, which every thread runs.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import Any, cast

from codegen.cpp.context import Context, dtype_of, refuse, shape_of
from codegen.cpp.kv_block import block_bytes, keys_in_lanes, stream_offsets
from codegen.cpp.spelling import CTYPES, literal, size
from ir.dims import Dim, product
from ir.graph import Op, Value, Weight, tensor_of
from ir.types import KV, DType, Tensor
from passes.match import attribute, operand

Printer = Callable[[Context, Op], list[str]]

ACTIVATIONS = {
    "none": "None", "relu": "Relu", "silu": "Silu", "gelu": "Gelu", "gelu_tanh": "GeluTanh",
    "sigmoid": "Sigmoid", "tanh": "Tanh",
}  # fmt: skip


def call(name: str, *args: object) -> str:
    """A call by every thread, broken after commas where it is long."""
    text = f"{name}(th, {', '.join(map(str, args))});"
    return "\n      ".join(textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False))


def _flat_rows(ctx: Context, op: Op, arg: Value) -> tuple[str, str]:
    """(rows, row stride) of an operand whose last axis is a row."""
    shape = shape_of(arg)
    if len(shape) == 2:
        return size(shape[0]), ctx.ld(arg)
    if not ctx.is_contiguous(arg):
        raise refuse(op, f"%{arg.name} is a view whose rows are not evenly spaced")
    return size(product(shape[:-1])), size(shape[-1])


def _needs(op: Op, *allowed: DType) -> None:
    for arg in (*op.args, *op.outs):
        if isinstance(arg, Value | Weight) and isinstance(arg.type, Tensor) and arg.type.dtype not in allowed:
            raise refuse(op, f"an operand of type {arg.type.dtype}; there is {', '.join(allowed)}")


def linear(ctx: Context, op: Op) -> list[str]:
    x, w = cast(Value, op.args[0]), cast(Any, op.args[1])
    bias, residual = operand(op, 2), operand(op, 3)
    if not ctx.is_constant(w) or dtype_of(x) is not DType.F32 or not dtype_of(w).is_float:
        raise refuse(op, "the weight must be a constant and the input f32")
    rows, ld = _flat_rows(ctx, op, x)
    r_ld = _flat_rows(ctx, op, cast(Value, residual))[1] if residual is not None else "0"
    k, n, gated = shape_of(x)[-1], shape_of(op.out)[-1], attribute(op, "gated")
    packed = ctx.weight(w, "paired" if gated else "panels")
    act = ACTIVATIONS[attribute(op, "activation")]
    fields = ", ".join(map(str, (ctx.pointer(op.out), n, ctx.pointer(bias), ctx.pointer(residual), r_ld, n)))
    return [
        f"Epilogue<{act}> finish{{{fields}}};",
        call(
            f"linear<{'true' if gated else 'false'}>",
            ctx.pointer(x), ld, rows, k, n, packed, ctx.scratch(op), "finish",
        ),
    ]  # fmt: skip


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


def _inner(ctx: Context, x: Value, rank: int = 1) -> str:
    """`Rows` of an operand whose last `rank` axes are one row."""
    shape = shape_of(x)
    width = product(shape[len(shape) - rank :])
    if len(shape) == rank:
        return f"Rows{{1, {size(width)}, 1, {size(width)}}}"
    middle = product(shape[1 : len(shape) - rank])
    return f"Rows{{{size(shape[0])}, {ctx.ld(x)}, {size(middle)}, {size(width)}}}"


def _norm_weight(op: Op, w: Any, rank: int) -> str:
    """Elements between the weights of a token's rows. The weight covers whole rows."""
    if w is None:
        return "0"
    shape, x = shape_of(w), shape_of(op.args[0])
    if shape[-rank:] != x[-rank:] or (
        len(shape) > rank and product(shape[:-rank]) not in (1, product(x[1:-rank]))
    ):
        raise refuse(op, f"a weight of shape {list(shape)} does not cover rows of {list(x)}")
    return "0" if product(shape[:-rank]) == 1 else str(product(x[-rank:]))


def norm(ctx: Context, op: Op) -> list[str]:
    _needs(op, DType.F32, DType.BF16)
    x, rank = cast(Value, op.args[0]), attribute(op, "rank")
    w, b = operand(op, 1), operand(op, 2)
    steps = {_norm_weight(op, a, rank) for a in (w, b) if a is not None} or {"0"}
    if len(steps) > 1 or dtype_of(x) is not DType.F32:
        raise refuse(op, "weight and bias must have one shape and the input be f32")
    weights = [ctx.pointer(w)] if op.kind == "rms_norm" else [ctx.pointer(w), ctx.pointer(b)]
    eps = literal(op.attr("eps"), DType.F32)
    return [
        call(op.kind, ctx.pointer(x), _inner(ctx, x, rank), *weights, steps.pop(), eps, ctx.pointer(op.out))
    ]


def rope(ctx: Context, op: Op) -> list[str]:
    _needs(op, DType.F32)
    x, cos, sin = (cast(Value, a) for a in op.args)
    shape, angles = shape_of(x), shape_of(cos)
    heads = product(angles[1:-1])
    if (
        len(angles) != len(shape)
        or heads not in (1, product(shape[1:-1]))
        or ctx.ld(cos) != ctx.ld(sin)
        or angles[0] not in (1, shape[0])
    ):
        raise refuse(op, f"cos {list(angles)} does not fit {list(shape)} row by row")
    cs_ld = ctx.ld(cos) if angles[0] == shape[0] else "0"
    pairs = angles[-1]
    form = f"Rope{{{pairs}, {attribute(op, 'offset')}, {cs_ld}, {0 if heads == 1 else pairs}}}"
    name = f"rope<{'true' if attribute(op, 'interleaved') else 'false'}>"
    return [
        call(
            name,
            ctx.pointer(x),
            _inner(ctx, x),
            ctx.pointer(cos),
            ctx.pointer(sin),
            form,
            ctx.pointer(op.out),
        )
    ]


def kv_write(ctx: Context, op: Op) -> list[str]:
    kv, group = cast(KV, cast(Value, op.args[0]).type), ctx.kv_group[op.out.name]
    offsets, layer_bytes = stream_offsets(kv)
    data, slots = f"(char*)s.groups[{group}].data", ctx.pointer(op.args[-1])
    lines: list[str] = []
    for index, (stream, x) in enumerate(zip(kv.streams, op.args[1:-1], strict=True)):
        if dtype_of(x) is not DType.F32 or stream.dtype not in (DType.F32, DType.BF16):
            raise refuse(op, f"stream {stream.name} of {stream.dtype} from {dtype_of(x)}")
        keys = "true" if keys_in_lanes(kv, index) else "false"
        name = f"kv_write<{keys}, {CTYPES[stream.dtype]}>"
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
    if not keys_in_lanes(kv, 0) or dtype_of(q) is not DType.F32 or kv.block != 16:
        raise refuse(op, "the first stream must be k, the queries f32 and blocks of 16 tokens")
    key, value = kv.streams[0], kv.streams[1]
    if {key.dtype, value.dtype} - {DType.F32, DType.BF16} or key.heads != value.heads:
        raise refuse(op, f"streams of {key.dtype} and {value.dtype}, {key.heads} and {value.heads} heads")
    offsets, layer_bytes = stream_offsets(kv)
    base = op.attr("layer") * layer_bytes
    mask = ctx.mask(op.attr("mask"), tuple(int(cast(Any, shape_of(t)[1])) for t in tables))
    scale, softcap = (literal(float(attribute(op, n)), DType.F32) for n in ("scale", "softcap"))
    types = f"{CTYPES[key.dtype]}, {CTYPES[value.dtype]}, {key.head_size}, {value.head_size}, {mask}"
    where = f"s.groups[{group}]"
    return [
        f"Cache cache{{(const char*){where}.data, {block_bytes(kv)},",
        f"            {base + offsets[0]}, {base + offsets[1]}, {where}.table, {where}.table_stride}};",
        f"AttentionArgs args{{{ctx.pointer(q)}, {ctx.ld(q)}, {ctx.pointer(op.out)}, {ctx.ld(op.out)},",
        f"                   {shape_of(q)[1]}, {key.heads}, {scale}, {softcap},",
        f"                   {ctx.pointer(sinks)}, {ctx.pointer(slopes)},",
        f"                   cache, s.lens, s.starts, R, {ctx.scratch(op)}}};",
        f"{mask} mask{{{', '.join(ctx.pointer(t) for t in tables)}}};",
        f"Attention<{types}>(args, mask).run(th);",
    ]


def take_rows(ctx: Context, op: Op) -> list[str]:
    x, rows = cast(Value, op.args[0]), cast(Value, op.args[1])
    if op.kind == "take" and op.attr("axis") != 0:
        raise refuse(op, "it gathers along an axis after the first")
    width, count = size(product(shape_of(x)[1:])), size(product(shape_of(rows)))
    y = ctx.pointer(op.out)
    return [call("take_rows", ctx.pointer(x), ctx.ld(x), width, ctx.pointer(rows), count, y, width)]


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


def reduction(ctx: Context, op: Op) -> list[str]:
    _needs(op, DType.F32)
    x, axes = cast(Value, op.args[0]), sorted(op.attr("axes"))
    rank = tensor_of(x).rank
    if axes != list(range(rank - len(axes), rank)) or len(axes) in (0, rank):
        raise refuse(
            op, f"it reduces axes {axes} of {list(shape_of(x))}; there is a kernel for the last ones"
        )
    rows = _inner(ctx, x, len(axes))
    if op.kind == "max":
        return [call("max_rows", ctx.pointer(x), rows, ctx.pointer(op.out))]
    width = size(product(shape_of(x)[rank - len(axes) :]))
    scale = "1.0f" if op.kind == "sum" else f"1.0f / float({width})"
    return [call("sum_rows", ctx.pointer(x), rows, scale, ctx.pointer(op.out))]


def along_last(ctx: Context, op: Op) -> list[str]:
    x = cast(Value, op.args[0])
    if op.attr("axis") != tensor_of(x).rank - 1 or (op.kind == "softmax" and dtype_of(x) is not DType.F32):
        raise refuse(op, "there is a kernel for the last axis of f32 values")
    return [call(f"{op.kind}_rows", ctx.pointer(x), _inner(ctx, x), ctx.pointer(op.out))]


def matmul(ctx: Context, op: Op) -> list[str]:
    _needs(op, DType.F32)
    x, y = cast(Any, op.args[0]), cast(Any, op.args[1])
    a, b, out = shape_of(x), shape_of(y), shape_of(op.out)
    shared = len(b) == 2 or (len(b) == len(a) and b[0] == 1 and a[0] != 1)
    batch = product(a[1:-2])
    if len(a) < 3 or a[0] != out[0] or product(b[:-2] if shared else b[1:-2]) != batch:
        raise refuse(op, f"{list(a)} times {list(b)} is not a product within each token")
    y_ld = "0" if shared else ctx.ld(y)
    sizes = (size(a[0]), batch, a[-2], a[-1], b[-1])
    return [call("matmul_rows", ctx.pointer(x), ctx.ld(x), ctx.pointer(y), y_ld, *sizes, ctx.pointer(op.out))]


def constant(ctx: Context, op: Op) -> list[str]:
    """iota, full and dim whose size is only known at run time."""
    dtype = dtype_of(op.out)
    count = size(product(shape_of(op.out)))
    if op.kind == "iota":
        return [call("iota", ctx.pointer(op.out), count)]
    value = (
        literal(op.attr("value"), dtype) if op.kind == "full" else f"{CTYPES[dtype]}({size(op.attr('size'))})"
    )
    return [call(f"fill<{CTYPES[dtype]}>", ctx.pointer(op.out), count, value)]


KERNELS: dict[str, Printer] = {
    "linear": linear,
    "embed": embed,
    "rms_norm": norm,
    "layer_norm": norm,
    "rope": rope,
    "kv_write": kv_write,
    "paged_attention": paged_attention,
    "take_rows": take_rows,
    "take": take_rows,
    "concat": concat,
    "split": split,
    "slice": slice_,
    "transpose": transpose,
    "reshape": reshape,
    "sum": reduction,
    "mean": reduction,
    "max": reduction,
    "softmax": along_last,
    "cumsum": along_last,
    "matmul": matmul,
    "iota": constant,
    "full": constant,
    "dim": constant,
}
