"""Calls of the kernels that write and read the KV cache."""

from __future__ import annotations

from typing import Any, cast

from codegen.cpp.context import Context, dtype_of, refuse, shape_of
from codegen.cpp.spelling import call, ctype, literal
from codegen.kv_block import BLOCKS, block_bytes, keys_in_lanes, stream_offsets
from ir.graph import Op, Value
from ir.ops.attention import FIRST_TABLE
from ir.types import KV, DType
from passes.match import attribute, operand


def _check_block(op: Op, kv: KV) -> None:
    if kv.block not in BLOCKS:
        raise refuse(op, f"blocks of {kv.block} tokens; there are those of {', '.join(map(str, BLOCKS))}")


def kv_write(ctx: Context, op: Op) -> list[str]:
    cache, group = cast(KV, cast(Value, op.args[0]).type), ctx.kv_group[op.out.name]
    _check_block(op, cache)
    offsets, layer_bytes = stream_offsets(cache)
    data, slots = f"(char*)s.groups[{group}].data", ctx.pointer(op.args[-1])
    lines: list[str] = []
    for index, (stream, x) in enumerate(zip(cache.streams, op.args[1:-1], strict=True)):
        if dtype_of(x) is not DType.F32 or stream.dtype not in (DType.F32, DType.BF16):
            raise refuse(op, f"stream {stream.name} of {stream.dtype} from {dtype_of(x)}")
        keys = "true" if keys_in_lanes(cache, index) else "false"
        name = f"kv_write<{keys}, {cache.block}, {ctype(stream.dtype)}>"
        place = (block_bytes(cache), op.attr("layer") * layer_bytes + offsets[index])
        lines.append(
            call(name, ctx.pointer(x), ctx.ld(x), "T", stream.heads, stream.head_size, slots, data, *place)
        )
    return lines


def paged_attention(ctx: Context, op: Op) -> list[str]:
    q, state = cast(Value, op.args[0]), cast(Value, op.args[1])
    sinks, slopes = operand(op, 5), operand(op, 6)
    tables = op.args[FIRST_TABLE:]
    cache, group = cast(KV, state.type), ctx.kv_group[state.name]
    if dtype_of(op.out) not in (DType.F32, DType.BF16):
        raise refuse(op, f"a result of {dtype_of(op.out)}; there are f32 and bf16")
    _check_block(op, cache)
    if not keys_in_lanes(cache, 0) or dtype_of(q) is not DType.F32:
        raise refuse(op, "the first stream must be k and the queries f32")
    key, value = cache.streams[0], cache.streams[1]
    if {key.dtype, value.dtype} - {DType.F32, DType.BF16} or key.heads != value.heads:
        raise refuse(op, f"streams of {key.dtype} and {value.dtype}, {key.heads} and {value.heads} heads")
    offsets, layer_bytes = stream_offsets(cache)
    base = op.attr("layer") * layer_bytes
    mask = ctx.mask(op.attr("mask"), tuple(int(cast(Any, shape_of(t)[1])) for t in tables))
    scale, softcap = (literal(float(attribute(op, n)), DType.F32) for n in ("scale", "softcap"))
    out = ctype(dtype_of(op.out))
    sizes = f"{key.head_size}, {value.head_size}, {cache.block}"
    types = f"{out}, {ctype(key.dtype)}, {ctype(value.dtype)}, {sizes}, {mask}"
    where = f"s.groups[{group}]"
    return [
        f"Cache cache{{(const char*){where}.data, {block_bytes(cache)},",
        f"            {base + offsets[0]}, {base + offsets[1]}, {where}.table, {where}.table_stride}};",
        f"AttentionArgs<{out}> args{{{ctx.pointer(q)}, {ctx.ld(q)}, {ctx.pointer(op.out)}, {ctx.ld(op.out)},",
        f"                   {shape_of(q)[1]}, {key.heads}, {scale}, {softcap},",
        f"                   {ctx.pointer(sinks)}, {ctx.pointer(slopes)},",
        f"                   cache, s.lens, s.starts, R, {ctx.scratch(op)}}};",
        f"{mask} mask{{{', '.join(ctx.pointer(t) for t in tables)}}};",
        f"Attention<{types}>(args, mask).run(th);",
    ]
