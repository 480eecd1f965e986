"""Writing into the cache under Triton's interpreter: every element in its place, and nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ir.graph import Graph
from ir.types import KV, DType, Stream
from tests.codegen import test_attention as shared
from tests.codegen.harness import Array, Chunk, arg, paged_builder, weight
from tests.triton.harness import TritonModel

BLOCKS = 12
STREAMS = {
    "f32": (Stream("k", DType.F32, 2, 40), Stream("v", DType.F32, 2, 40)),
    "bf16": (Stream("k", DType.BF16, 3, 17), Stream("v", DType.BF16, 3, 9)),
    "three": (Stream("k", DType.BF16, 1, 64), Stream("v", DType.F32, 1, 5), Stream("x", DType.BF16, 4, 2)),
    "one": (Stream("k", DType.F32, 1, 1),),
}


def graph(streams: tuple[Stream, ...], dtype: DType) -> Graph:
    """What is written are parts of one wider row, as merged projections leave them."""
    b, (state,) = paged_builder(KV(streams, 3))
    widths = [s.heads * s.head_size for s in streams]
    row = b.op("embed", arg(b, "ids"), weight("rows", 50, sum(widths) + 7, dtype=dtype))
    result = b.op("cast", row, dtype=DType.F32)
    for layer in (2, 0):
        *values, _ = b.op("split", row, several=True, axis=1, sizes=(*widths, 7))
        views = [
            b.op("reshape", v, shape=(shared._T, s.heads, s.head_size))
            for v, s in zip(values, streams, strict=True)
        ]
        state = b.op("kv_write", state, *views, arg(b, "slots0"), layer=layer)
    return b.graph([result, state])


def rows_of(state: dict[str, Array], stream: Stream, layer: int) -> Array:
    return state[stream.name][layer].reshape(BLOCKS * 16, -1).astype(np.float32)


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("name", STREAMS)
def test_elements_lie_in_their_slots_and_nothing_else_is_written(
    tmp_path: Path, name: str, dtype: DType
) -> None:
    streams = STREAMS[name]
    model = TritonModel(graph(streams, dtype), None, tmp_path)
    rng = np.random.default_rng(0)
    chunks = [
        Chunk([7, 3, 11], 15, [int(i) for i in rng.integers(0, 50, 20)]),
        Chunk([-1, -1], 3, [1, 2, 3]),  # tokens that fill the step up: their slots are below 0
        Chunk([0], 0, [4]),
    ]
    (pool,) = cache = model.cache(BLOCKS)
    model.step(cache, chunks)
    state = model.decode_cache(pool, 0, BLOCKS)
    slots = [(7, 3, 11)[p // 16] * 16 + p % 16 for p in range(15, 35)] + [0]
    ids = [*chunks[0].ids, *chunks[2].ids]
    start = 0
    for stream in streams:
        width = stream.heads * stream.head_size
        want = model.weights["rows"].astype(np.float32)[ids, start : start + width]
        want = want.astype(stream.dtype.numpy).astype(np.float32)
        start += width
        for layer in (0, 2):
            assert np.array_equal(rows_of(state, stream, layer)[slots], want)
            assert np.isnan(np.delete(rows_of(state, stream, layer), slots, 0)).all()
        assert np.isnan(rows_of(state, stream, 1)).all()
