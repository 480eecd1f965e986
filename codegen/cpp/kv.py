"""Calls of the kernels that write and read the KV cache."""

from __future__ import annotations

from typing import Any, cast

from codegen.cpp.context import Context, dtype_of, refuse, shape_of
from codegen.cpp.spelling import call, ctype, literal
from codegen.kv_block import BLOCKS, STRIP, Place, block_bytes, keys_in_lanes, stream_places
from codegen.masks import key_range
from ir.graph import Arg, Op, Value
from ir.ops.attention import FIRST_TABLE, TAIL
from ir.types import CHANNEL, KV, DType, Stream
from passes.match import attribute, operand

ELEMENTS = {
    DType.F32: "float",
    DType.BF16: "bf16",
    DType.I8: "kv::i8",
    DType.F8E4M3: "kv::f8",
    DType.U4: "kv::u4",
    DType.U2: "kv::u2",
}


def _check(op: Op, kv: KV) -> None:
    """Raises CodegenError for a state that no kernel is for."""
    if kv.block not in BLOCKS:
        raise refuse(op, f"blocks of {kv.block} tokens; there are those of {', '.join(map(str, BLOCKS))}")
    for index, stream in enumerate(kv.streams):
        if stream.dtype not in ELEMENTS:
            raise refuse(op, f"stream {stream.name} of {stream.dtype}; there are {', '.join(ELEMENTS)}")
        if stream.dtype.bits < 8 and kv.block < STRIP:
            raise refuse(op, f"{stream.dtype} in blocks of {kv.block} tokens; they need {STRIP} or more")
        keys = keys_in_lanes(kv, index)
        if kv.needs_tail and (stream.per == CHANNEL) != keys:
            where = "where blocks have a tail, keys have theirs per channel and values per token"
            raise refuse(op, f"stream {stream.name} with a scale per {stream.per}; {where}")


def _state(ctx: Context, arg: object) -> tuple[KV, str]:
    """The type of a state, and its group of the step."""
    value = cast(Value, arg)
    return cast(KV, value.type), f"s.groups[{ctx.kv_group[value.name]}]"


def _place(place: Place) -> str:
    return f"{{{place.codes}, {place.scales}, {place.minima}}}"


def kv_write(ctx: Context, op: Op) -> list[str]:
    cache, group = _state(ctx, op.args[0])
    _check(op, cache)
    lines: list[str] = []
    places = stream_places(cache, op.attr("layer"))
    for index, (stream, x) in enumerate(zip(cache.streams, op.args[1:-1], strict=True)):
        if dtype_of(x) is not DType.F32:
            raise refuse(op, f"stream {stream.name} from {dtype_of(x)}")
        keys = "true" if keys_in_lanes(cache, index) else "false"
        rows = (ctx.pointer(x), ctx.ld(x), "T", stream.heads, stream.head_size, ctx.pointer(op.args[-1]))
        where = (f"(char*){group}.data", block_bytes(cache), f"Place{_place(places[index])}")
        lines.append(call(f"kv_write<{keys}, {cache.block}, {ELEMENTS[stream.dtype]}>", *rows, *where))
    return lines


def kv_seal(ctx: Context, op: Op) -> list[str]:
    (cache, group), (tail, tail_group) = _state(ctx, op.args[0]), _state(ctx, op.args[1])
    _check(op, cache)
    _check(op, tail)
    layer, lines = op.attr("layer"), list[str]()
    for index, (stream, exact) in enumerate(zip(cache.streams, tail.streams, strict=True)):
        keys = "true" if keys_in_lanes(cache, index) else "false"
        types = f"{keys}, {cache.block}, {ELEMENTS[stream.dtype]}, {ELEMENTS[exact.dtype]}"
        ends = [
            f"Stored{{(char*){where}.data, {block_bytes(kv)}, {_place(stream_places(kv, layer)[index])}, "
            f"{where}.table, {where}.table_stride}}"
            for kv, where in ((cache, group), (tail, tail_group))
        ]
        sizes = (stream.heads, stream.head_size, "s.lens", "s.starts", "R")
        lines.append(call(f"kv_seal<{types}>", *sizes, *ends))
    return lines


def _partition(kv: KV) -> str:
    """The type of the kernel over the keys of a cache's partition."""
    key, value = (
        f"Elements<{ELEMENTS[s.dtype]}{', true' if s.per == CHANNEL else ''}>" for s in kv.streams[:2]
    )
    return f"Partition<{key}, {value}, {kv.streams[0].head_size}, {kv.streams[1].head_size}, {kv.block}>"


def _cache(kv: KV, group: str, layer: int) -> str:
    key, value = stream_places(kv, layer)[:2]
    return (
        f"{{(const char*){group}.data, {block_bytes(kv)}, {_place(key)}, {_place(value)}, "
        f"{group}.table, {group}.table_stride}}"
    )


def _check_read(op: Op, kv: KV) -> None:
    _check(op, kv)
    key, value = kv.streams[0], kv.streams[1]
    if dtype_of(op.out) not in (DType.F32, DType.BF16):
        raise refuse(op, f"a result of {dtype_of(op.out)}; there are f32 and bf16")
    if not keys_in_lanes(kv, 0) or dtype_of(op.args[0]) is not DType.F32:
        raise refuse(op, "the first stream must be k and the queries f32")
    if key.heads != value.heads:
        raise refuse(op, f"streams of {key.heads} and {value.heads} heads")


def _bias(ctx: Context, bias: Arg) -> tuple[str, str]:
    """Slopes, and numbers by distance and how many: the kernel's operands for what is added by distance."""
    pointer, shape = ctx.pointer(bias), () if bias is None else shape_of(bias)
    return ("nullptr", f"{pointer}, {shape[1]}") if len(shape) == 2 else (pointer, "nullptr, 0")


def paged_attention(ctx: Context, op: Op) -> list[str]:
    q, (cache, group) = op.args[0], _state(ctx, op.args[1])
    _check_read(op, cache)
    layer, tables = op.attr("layer"), op.args[FIRST_TABLE:]
    tail, tail_types = "{}", "void"
    if cache.needs_tail:
        if not key_range(op.attr("mask")).causal:
            raise refuse(op, "a query that may see later keys, in a cache with a tail")
        exact, exact_group = _state(ctx, operand(op, TAIL))
        _check_read(op, exact)
        tail, tail_types = _cache(exact, exact_group, layer), _partition(exact)
    mask = ctx.mask(op.attr("mask"), tuple(int(cast(Any, shape_of(t)[1])) for t in tables))
    scale, softcap = (literal(float(attribute(op, n)), DType.F32) for n in ("scale", "softcap"))
    sinks, (slopes, distances) = ctx.pointer(operand(op, 5)), _bias(ctx, operand(op, 6))
    key, value = cast("tuple[Stream, Stream]", cache.streams[:2])
    out = ctype(dtype_of(op.out))
    return [
        f"AttentionArgs<{out}> args{{{ctx.pointer(q)}, {ctx.ld(q)}, {ctx.pointer(op.out)}, {ctx.ld(op.out)},",
        f"                   {shape_of(q)[1]}, {key.heads}, {scale}, {softcap}, {sinks},",
        f"                   {slopes}, {distances},",
        f"                   {_cache(cache, group, layer)},",
        f"                   {tail},",
        f"                   s.lens, s.starts, R, {ctx.scratch(op)}}};",
        f"{mask} mask{{{', '.join(ctx.pointer(t) for t in tables)}}};",
        f"using Main = {_partition(cache)};",
        f"using Tail = {tail_types};",
        f"Attention<{out}, Main, Tail, {key.head_size}, {value.head_size}, {mask}>(args, mask).run(th);",
    ]
