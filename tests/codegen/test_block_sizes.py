"""KV blocks of 8, 16, 32 and 64 tokens: close to float64, and the same bits for all, at every ISA level."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen import cpp
from codegen.kv_block import BLOCKS, block_bytes
from ir.graph import Graph
from ir.interpret import empty_kv
from ir.types import KV, DType, Stream
from tests.codegen.harness import (
    Array,
    Chunk,
    Model,
    aligned,
    arg,
    build_cpp,
    levels,
    lower,
    paged_builder,
    pointer,
    reference_step,
    weight,
)
from tests.codegen.test_attention import _T, VOCAB, Case, predicate

POOL_TOKENS = 1024
STRIDE = POOL_TOKENS // min(BLOCKS)
GARBAGE = -(1 << 30)
WINDOW = 24  # its edge falls between the two blocks of 8 that 16 keys are read from
SOURCE = """
#include "abi.h"
#include "vec.h"
using namespace octavo;

template <class T>
static void halves(const T* low, const T* high, float* y) { store(y, load_halves(low, high)); }
extern "C" OCTAVO_EXPORT void halves_f32(const float* a, const float* b, float* y) { halves(a, b, y); }
extern "C" OCTAVO_EXPORT void halves_bf16(const bf16* a, const bf16* b, float* y) { halves(a, b, y); }
"""


def case(seed: int) -> Case:
    """A shape at random: heads, sizes of keys and of values."""
    rng = np.random.default_rng(seed)
    kv_heads, group = (int(n) for n in rng.integers(1, 4, 2))
    size, value_size = (int(n) for n in rng.integers(1, 50, 2))
    mask = f"(k <= q) & (q - k < {WINDOW})"
    return Case(kv_heads * group, kv_heads, size, value_size, mask, sinks=True)


def states(of: Case) -> list[KV]:
    """One group for each block size. The keys are bf16 and the values f32."""
    keys, values = of.kv.streams
    return [KV((replace(keys, dtype=DType.BF16), values), 1, block, WINDOW) for block in BLOCKS]


def graph(of: Case) -> Graph:
    """The same attention over the same keys and values, once for each block size, side by side."""
    b, groups = paged_builder(*states(of), context=POOL_TOKENS)
    key, value = of.kv.streams
    rows = [(of.heads, key.head_size), (of.kv_heads, key.head_size), (of.kv_heads, value.head_size)]
    q, k, v = (
        b.op("reshape", b.op("embed", arg(b, "ids"), weight(name, VOCAB, h * d)), shape=(_T, h, d))
        for name, (h, d) in zip("qkv", rows, strict=True)
    )
    results, written = [], []
    for g, state in enumerate(groups):
        state = b.op("kv_write", state, k, v, arg(b, f"slots{g}"), layer=0)
        step = (arg(b, f"table{g}"), arg(b, "lens"), arg(b, "starts"))
        out = b.op("paged_attention", q, state, *step, weight("sinks", of.heads), layer=0,
                   scale=3 * of.size**-0.5, mask=predicate(of.mask))  # fmt: skip
        results.append(b.op("reshape", out, shape=(_T, of.heads * value.head_size)))
        written.append(state)
    return b.graph([b.op("concat", *results, axis=1), *written])


@dataclass(frozen=True)
class Request:
    """The r-th of `count`. Its blocks lie in no order in its share of the pool, its last one at the end."""

    r: int
    count: int
    ids: list[int]

    def chunk(self, first: int, last: int) -> Scattered:
        return Scattered([], first, self.ids[first:last], self)

    def table(self, size: int) -> list[int]:
        share = POOL_TOKENS // self.count // size
        order = np.random.default_rng(self.r).permutation(share)
        end, place = int(np.argmax(order)), -(-len(self.ids) // size) - 1
        order[[end, place]] = order[[place, end]]
        return [self.r * share + int(block) for block in order]

    def slots(self, size: int) -> list[int]:
        table = self.table(size)
        return [table[p // size] * size + p % size for p in range(len(self.ids))]


@dataclass
class Scattered(Chunk):
    """A request's part of a step. Entries of its tables that no query of the step may read are garbage."""

    request: Request

    def blocks(self, size: int) -> list[int]:
        dead, used = max(0, self.before - WINDOW + 1) // size, -(-(self.before + len(self.ids)) // size)
        return [GARBAGE] * dead + self.request.table(size)[dead:used]


def requests(*lengths: int) -> list[Request]:
    rng = np.random.default_rng(sum(lengths))
    ids = [[int(i) for i in rng.integers(0, VOCAB, n)] for n in lengths]
    return [Request(r, len(lengths), each) for r, each in enumerate(ids)]


def run(model: Model, steps: Sequence[Sequence[Chunk]], threads: int = 2) -> tuple[Array, list[Array]]:
    """The rows of all steps, [tokens, block sizes, width], and the caches after them."""
    engine = model.open(threads)
    cache = [aligned(POOL_TOKENS // kv.block * block_bytes(kv), np.uint8, 255) for kv in model.states]
    found = np.concatenate([model.step(engine, cache, chunks, stride=STRIDE) for chunks in steps])
    model.library.octavo_close(engine)
    return found.reshape(len(found), len(BLOCKS), -1), cache


@pytest.fixture(scope="module", params=list(enumerate(levels())), ids=lambda each: each[1])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    seed, level = request.param
    return Model(graph(case(seed)), None, tmp_path_factory.mktemp("blocks"), isa=level)


def test_every_block_size_is_close_to_float64_and_has_the_same_bits(model: Model) -> None:
    step = [r.chunk(0, len(r.ids)) for r in requests(1, 7, 8, 9, 16, 17, 71, 128)]
    got, _ = run(model, [step])
    empty = [empty_kv(kv, POOL_TOKENS // kv.block) for kv in model.states]
    want, _ = reference_step(model.graph, model.weights, empty, step)
    assert np.abs(got - want.reshape(got.shape)).max() < 2e-5 * want.std()
    assert (got == got[:, :1]).all()


def test_bits_do_not_depend_on_chunks_and_batches(model: Model) -> None:
    first, second = requests(330, 77)
    (want, _), (other, _) = run(model, [[first.chunk(0, 330)]]), run(model, [[second.chunk(0, 77)]])
    cuts = [0, 5, 41, 257, 300, 301, 330]
    steps = [[first.chunk(a, b)] for a, b in pairwise(cuts)]
    steps[-1].insert(0, second.chunk(0, 77))
    got, _ = run(model, steps, threads=3)
    assert np.array_equal(got[:301], want[:301]) and np.array_equal(got[-29:], want[-29:])
    assert np.array_equal(got[301:-29], other)
    assert (got == got[:, :1]).all()


def check_slots(model: Any, request: Request, caches: list[Array]) -> None:
    """Assert that a request's keys and values lie in its slots, and that nothing else was written.

    model: of any target.
    """
    for g, (kv, cache) in enumerate(zip(model.states, caches, strict=True)):
        slots = request.slots(kv.block)
        state = model.decode_cache(cache, g, POOL_TOKENS // kv.block)
        for stream in kv.streams:
            rows = state[stream.name].reshape(POOL_TOKENS, -1)
            want = model.weights[stream.name][request.ids].astype(stream.dtype.numpy)
            assert np.array_equal(rows[slots], want)
            assert np.isnan(np.delete(rows, slots, 0).astype(np.float32)).all(), "wrote outside the slots"


def test_keys_and_values_lie_in_their_slots(model: Model) -> None:
    (request,) = requests(131)
    _, caches = run(model, [[request.chunk(0, 40)], [request.chunk(40, 131)]])
    check_slots(model, request, caches)


@pytest.mark.parametrize("level", levels())
def test_a_vector_of_two_halves(tmp_path: Path, level: str) -> None:
    library = build_cpp(SOURCE, tmp_path, level)
    functions = {DType.F32: library.halves_f32, DType.BF16: library.halves_bf16}
    for dtype, function in functions.items():
        low, high = np.random.default_rng(0).standard_normal((2, 8)).astype(dtype.numpy)
        out = np.full(16, np.nan, np.float32)
        function(*(ctypes.c_void_p(pointer(each)) for each in (low, high, out)))
        assert np.array_equal(out, np.concatenate([low, high]).astype(np.float32))


def test_other_block_sizes_are_refused() -> None:
    b, (state,) = paged_builder(KV((Stream("k", DType.F32, 1, 4),), 1, 12))
    x = b.op("reshape", b.op("embed", arg(b, "ids"), weight("k", VOCAB, 4)), shape=(_T, 1, 4))
    state = b.op("kv_write", state, x, arg(b, "slots0"), layer=0)
    with pytest.raises(cpp.CodegenError, match="blocks of 12 tokens; there are those of 8, 16, 32, 64"):
        cpp.generate(lower(b.graph([x, state])))
