"""Quantised caches under Triton's interpreter: codes and scales as the formats say, each in its place, and
nothing else written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ir.graph import Graph
from ir.types import CHANNEL, KV, DType, Stream
from tests.codegen import test_attention as shared
from tests.codegen.harness import Array, Chunk, arg, paged_builder, weight
from tests.triton.harness import TritonModel
from tests.triton.kv_reference import encoded

BLOCKS, VOCAB = 12, 50
I8, F8, U4, U2, BF16 = DType.I8, DType.F8E4M3, DType.U4, DType.U2, DType.BF16
WRITTEN = {
    "bytes": (Stream("k", I8, 3, 64), Stream("v", F8, 3, 17)),
    "packed": (Stream("k", U4, 2, 20), Stream("v", U2, 2, 33)),
    "mixed": (Stream("k", F8, 1, 5), Stream("v", DType.F32, 4, 7), Stream("x", U4, 2, 1)),
    "wide": (Stream("k", I8, 1, 128), Stream("v", BF16, 2, 80)),
}
SEALED = {
    16: (Stream("k", U4, 2, 20, CHANNEL), Stream("v", U4, 2, 64)),
    8: (Stream("k", U2, 1, 17, CHANNEL), Stream("v", U2, 1, 15), Stream("x", I8, 1, 16)),
    64: (Stream("k", U4, 2, 64, CHANNEL), Stream("v", F8, 2, 9), Stream("x", BF16, 2, 3)),
}


def rows(seed: int, width: int) -> Array:
    """Elements of many sizes, a row of zeros, and rows of equal ones."""
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-9, 6, (VOCAB, 1)))
    found = (rng.standard_normal((VOCAB, width)) * sizes).astype(np.float32)
    found[1], found[2], found[3] = 0, 0.3, -7e-8
    return found.astype(BF16.numpy).astype(np.float32)


def graph(kv: KV, tail: KV | None = None, dtype: DType = DType.F32) -> Graph:
    """What is written are parts of one wider row, as merged projections leave them."""
    b, (state, *others) = paged_builder(kv, *([] if tail is None else [tail]))
    widths = [s.heads * s.head_size for s in kv.streams]
    row = b.op("embed", arg(b, "ids"), weight("rows", VOCAB, sum(widths) + 7, dtype=dtype))
    *values, _ = b.op("split", row, several=True, axis=1, sizes=(*widths, 7))
    views = [
        b.op("reshape", v, shape=(shared._T, s.heads, s.head_size))
        for v, s in zip(values, kv.streams, strict=True)
    ]
    written = []
    for layer in (2, 0):
        if tail is None:
            state = b.op("kv_write", state, *views, arg(b, "slots0"), layer=layer)
            continue
        others[0] = b.op("kv_write", others[0], *views, arg(b, "slots1"), layer=layer)
        step = (arg(b, n) for n in ("table0", "table1", "lens", "starts"))
        state = b.op("kv_seal", state, others[0], *step, layer=layer)
        written = [others[0]]
    return b.graph([b.op("cast", row, dtype=DType.F32), state, *written])


def model(tmp_path: Path, kv: KV, tail: KV | None = None, dtype: DType = DType.F32) -> TritonModel:
    width = sum(s.heads * s.head_size for s in kv.streams) + 7
    return TritonModel(graph(kv, tail, dtype), {"rows": rows(0, width).astype(dtype.numpy)}, tmp_path)


def of_stream(model: TritonModel, kv: KV, index: int, ids: list[int]) -> Array:
    """What tokens have written into a stream: [tokens, heads, size]."""
    widths = [s.heads * s.head_size for s in kv.streams]
    start, s = sum(widths[:index]), kv.streams[index]
    found = model.weights["rows"].astype(np.float32)[ids, start : start + widths[index]]
    return found.reshape(len(ids), s.heads, s.head_size)


def same(got: Array, want: Array) -> bool:
    """Equal as bits, so that poison is compared too."""
    return np.array_equal(np.ascontiguousarray(got).view(np.uint8), np.ascontiguousarray(want).view(np.uint8))


@pytest.mark.parametrize("name", WRITTEN)
def test_codes_and_scales_lie_in_their_slots_and_nothing_else_is_written(tmp_path: Path, name: str) -> None:
    kv = KV(WRITTEN[name], 3)
    of = model(tmp_path, kv, dtype=BF16 if name == "packed" else DType.F32)
    chunks = [
        Chunk([7, 3, 11], 15, [*range(1, 4), *range(30, 47)]),
        Chunk([-1, -1], 3, [1, 2, 3]),  # tokens that fill the step up: their slots are below 0
        Chunk([0], 0, [4]),
    ]
    (pool,) = cache = of.cache(BLOCKS)
    before = of.decode_cache(pool.copy(), 0, BLOCKS)
    of.step(cache, chunks)
    state = of.decode_cache(pool, 0, BLOCKS)
    slots = [(7, 3, 11)[p // 16] * 16 + p % 16 for p in range(15, 35)] + [0]
    for index, stream in enumerate(kv.streams):
        want = encoded(of_stream(of, kv, index, [*chunks[0].ids, 4]), stream)
        for part in stream.parts:
            for layer in range(3):
                expected = before[part][layer].reshape(BLOCKS * 16, *before[part].shape[3:])
                if layer != 1:
                    expected[slots] = want[part]
                assert same(state[part][layer].reshape(expected.shape), expected), (part, layer)


@pytest.mark.parametrize("block", SEALED)
def test_blocks_that_a_step_fills_are_sealed_and_no_others(tmp_path: Path, block: int) -> None:
    kv = KV(SEALED[block], 3, block)
    tail = KV(tuple(Stream(s.name, BF16, s.heads, s.head_size) for s in kv.streams), 3, block, tail=True)
    of = model(tmp_path, kv, tail)
    first, second = ([int(i) for i in np.random.default_rng(n).integers(1, VOCAB, 3 * block)] for n in (1, 2))
    steps = [  # of two requests: tokens before and in the step
        [(0, block - 1), (0, 1)],
        [(block - 1, 1), (1, block)],
        [(block, 2 * block), (block + 1, 0)],
        [(3 * block, 0), (block + 1, block - 1)],
    ]
    cache = of.cache(BLOCKS)
    tables, tails = ([7, 3, 11], [0, 5]), ([2, 9, 4], [8, 1])
    expected = of.decode_cache(cache[0].copy(), 0, BLOCKS)
    for step in steps:
        chunks, exact = [], []
        for (before, count), ids, table, own in zip(step, (first, second), tables, tails, strict=True):
            chunks.append(Chunk(table, before, ids[before : before + count]))
            exact.append(Chunk(own, before, chunks[-1].ids))
            for i in range(before // block, (before + count) // block):
                for index, stream in enumerate(kv.streams):
                    x = of_stream(of, kv, index, ids[i * block : (i + 1) * block])
                    for part, value in encoded(x, stream).items():
                        expected[part][[0, 2], table[i]] = value
        of.step(cache, chunks, tails=exact)
        state = of.decode_cache(cache[0], 0, BLOCKS)
        for part, value in expected.items():
            assert same(state[part], value), (part, step)
