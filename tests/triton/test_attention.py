"""Paged attention under Triton's interpreter against float64, over poisoned caches; and its bits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from codegen.kv_block import stream_offsets
from ir.graph import Graph
from ir.types import KV, DType
from tests.codegen import test_attention as shared
from tests.codegen.harness import Array, Chunk, arg, empty_states, paged_builder, reference_step, weight
from tests.codegen.test_attention import BLOCKS, CASES, VOCAB, Case, predicate
from tests.triton.harness import TritonModel

GARBAGE = -(1 << 30)  # of a table's entries that nothing may read


def graph(case: Case, out: DType | None = None, context: int = 1024) -> Graph:
    """One layer of attention; the second of two in the cache."""
    kv = replace(case.kv, layers=2)
    b, (state,) = paged_builder(kv, context=context)
    rows = [(case.heads, case.size), *((s.heads, s.head_size) for s in kv.streams)]
    q, k, v = (
        b.op("reshape", b.op("embed", arg(b, "ids"), weight(n, VOCAB, h * d)), shape=(shared._T, h, d))
        for n, (h, d) in zip("qkv", rows, strict=True)
    )
    state = b.op("kv_write", state, k, v, arg(b, "slots0"), layer=1)
    extra = [
        weight("sinks", case.heads) if case.sinks else None,
        weight("bias", *case.bias) if case.bias else None,
        *([None, None, weight("table", 7, 5, dtype=DType.BOOL)] if case.table else []),
    ]
    step = (arg(b, "table0"), arg(b, "lens"), arg(b, "starts"))
    attended = b.op("paged_attention", q, state, *step, *extra, layer=1, scale=3 * case.size**-0.5,
                    mask=predicate(case.mask), softcap=case.softcap, dtype=out)  # fmt: skip
    width = case.heads * kv.streams[1].head_size
    result = b.op("reshape", attended, shape=(shared._T, width))
    return b.graph([b.op("cast", result, dtype=DType.F32) if out else result, state])


@dataclass
class Step:
    """One step of requests whose tokens before it are in the cache already, random numbers."""

    model: TritonModel
    chunks: list[Chunk]
    seed: int = 0

    def states(self) -> list[dict[str, Array]]:
        rng = np.random.default_rng(self.seed)
        states = empty_states(self.model.graph, BLOCKS)
        for kv, state in zip(self.model.states, states, strict=True):
            for stream in kv.streams:
                array = state[stream.name]
                for c in self.chunks:
                    for p in range(c.before):
                        if c.table[p // kv.block] >= 0:
                            values = rng.standard_normal((kv.layers, stream.heads, stream.head_size))
                            values = values.astype(np.float32).astype(stream.dtype.numpy)
                            array[:, c.table[p // kv.block], p % kv.block] = values.astype(array.dtype)
        return states

    def got(self) -> Array:
        cache = self.model.cache(BLOCKS)
        for pool, kv, state in zip(cache, self.model.states, self.states(), strict=True):
            encode(pool, kv, state)
        return self.model.step(cache, self.chunks)

    def want(self) -> Array:
        with np.errstate(invalid="ignore"):
            return reference_step(self.model.graph, self.model.weights, self.states(), self.chunks)[0]


def encode(pool: Array, kv: KV, state: dict[str, Array]) -> None:
    """The counterpart of TritonModel.decode_cache."""
    offsets, layer_bytes = stream_offsets(kv)
    raw = pool.reshape(BLOCKS, -1)
    for s, offset in zip(kv.streams, offsets, strict=True):
        for layer in range(kv.layers):
            start = layer * layer_bytes + offset
            part = state[s.name][layer].transpose(0, 2, 1, 3).astype(s.dtype.numpy)
            raw[:, start : start + s.bytes_per_block(kv.block)] = (
                np.ascontiguousarray(part).view(np.uint8).reshape(BLOCKS, -1)
            )


def tolerance(case: Case) -> float:
    """Of the standard deviation. Scores with slopes are as large as distances, and so are their roundings."""
    return 2e-2 if case.dtype is DType.BF16 else 1e-4 if case.slopes else 2e-5


def check(got: Array, want: Array, bound: float) -> None:
    seen = ~np.isnan(want).any(1)  # the reference divides nothing by nothing where a row sees no key
    assert np.isfinite(got).all() and seen.any()
    assert np.abs(got[seen] - want[seen]).max() < bound * max(want[seen].std(), 1e-3)


def chunks_of(parts: list[tuple[int, int]], seed: int = 0, window: int | None = None) -> list[Chunk]:
    """A chunk for each (tokens before, tokens in the step); blocks lie in no order.

    Table entries of blocks that lie before the window are garbage.
    """
    rng = np.random.default_rng(seed)
    order, found = [int(b) for b in rng.permutation(BLOCKS)], []
    for before, count in parts:
        used = -(-(before + count) // 16)
        table, order = order[:used], order[used:]
        if window is not None:
            dead = max(0, before - window + 1) // 16
            table = [GARBAGE] * dead + table[dead:]
        found.append(Chunk(table, before, [int(i) for i in rng.integers(0, VOCAB, count)]))
    return found


# --- the masks and shapes of the CPU's tests

PARTS = [(0, 70), (260, 1), (5, 0), (30, 33), (0, 1), (15, 2), (299, 16)]


@pytest.fixture(scope="module")
def all_cases(tmp_path_factory: pytest.TempPathFactory) -> TritonModel:
    return TritonModel(shared.graph(), None, tmp_path_factory.mktemp("attention"))


@pytest.fixture(scope="module")
def mixed(all_cases: TritonModel) -> tuple[Array, Array]:
    step = Step(all_cases, chunks_of(PARTS))
    return step.got(), step.want()


@pytest.fixture(scope="module")
def decoding(all_cases: TritonModel) -> tuple[Array, Array]:
    """As many tokens as requests: the launches without prefill."""
    step = Step(all_cases, chunks_of([(380, 1), (0, 1), (256, 1)]))
    return step.got(), step.want()


@pytest.mark.parametrize("name", CASES)
def test_mixed_step_is_close_to_float64(mixed: tuple[Array, Array], name: str) -> None:
    got, want = (a[:, shared.columns()[name]] for a in mixed)
    check(got, want, tolerance(CASES[name]))


@pytest.mark.parametrize("name", CASES)
def test_decoding_is_close_to_float64(decoding: tuple[Array, Array], name: str) -> None:
    got, want = (a[:, shared.columns()[name]] for a in decoding)
    check(got, want, tolerance(CASES[name]))


# --- random shapes

MASKS = {
    "k <= q": None,
    "(k <= q) & (q - k < 24)": 24,
    "(k <= q) & (q - k < 130)": 130,
    "(k <= q) & ((k // 100) == (q // 100))": None,
    "(k <= q) & ((k // 64) == (q // 64)) & (q - k < 40)": 40,
    "(k <= q) & (mod(q + 3*k, 5) < 2)": None,
    "(k <= q) | (k < 3)": None,
    "k < q + 7": None,
    "q - k < 60": 60,
}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kv_heads, group = draw(st.sampled_from((1, 2))), draw(st.integers(1, 16))
    size = draw(st.one_of(st.sampled_from((64, 72, 80, 96, 128)), st.integers(32, 256)))
    value_size = draw(st.sampled_from((0, 0, 0, 48, 128)))
    return Case(
        kv_heads * group, kv_heads, size, value_size, draw(st.sampled_from(sorted(MASKS))),
        draw(st.sampled_from((DType.F32, DType.F32, DType.BF16))), draw(st.sampled_from((0.0, 0.0, 4.0))),
        draw(st.booleans()), draw(st.sampled_from((False, False, True))),
    )  # fmt: skip


@st.composite
def parts(draw: st.DrawFn) -> list[tuple[int, int]]:
    """(tokens before, tokens in the step) of up to four requests; one at least has tokens."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        length = draw(st.integers(1, 400))
        count = draw(st.one_of(st.sampled_from((0, 1, 1, 2)), st.integers(1, length)))
        found.append((max(0, length - count), count))
    return found if any(n for _, n in found) else [(found[0][0], 1), *found[1:]]


@settings(
    max_examples=10, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
@given(case=cases(), parts=parts(), invariant=st.booleans())
def test_random_shapes_are_close_to_float64(
    tmp_path_factory: pytest.TempPathFactory, case: Case, parts: list[tuple[int, int]], invariant: bool
) -> None:
    model = TritonModel(graph(case), None, tmp_path_factory.mktemp("random"), invariant=invariant)
    step = Step(model, chunks_of(parts, window=MASKS[case.mask]))
    check(step.got(), step.want(), tolerance(case))


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        (Case(71, 1, 64), [(40, 1), (0, 5), (300, 2)]),  # a token's heads are most of a tile
        (Case(150, 1, 32, sinks=True), [(270, 1), (0, 3)]),  # and more than one
        (Case(2, 2, 64, mask="(k <= q) & (q - k < 24)"), [(390, 1), (380, 20), (100, 40)]),
        (Case(1, 1, 256, 16), [(127, 1), (128, 1), (129, 128)]),
    ],
    ids=["71_heads", "150_heads", "dropped_blocks", "edges"],
)
@pytest.mark.parametrize("invariant", [False, True])
def test_shape(tmp_path: Path, case: Case, parts: list[tuple[int, int]], invariant: bool) -> None:
    model = TritonModel(graph(case), None, tmp_path, invariant=invariant)
    step = Step(model, chunks_of(parts, window=MASKS[case.mask]))
    check(step.got(), step.want(), tolerance(case))


@pytest.mark.parametrize("out", [DType.BF16, DType.F32])
def test_bf16_cache_and_result(tmp_path: Path, out: DType) -> None:
    model = TritonModel(graph(Case(4, 2, 64, dtype=DType.BF16), out), None, tmp_path)
    step = Step(model, chunks_of([(0, 20), (40, 1)]))
    check(step.got(), step.want(), 2e-2)


def test_rows_that_see_no_key_are_finite_and_alone(tmp_path: Path) -> None:
    case = Case(2, 1, 32, mask="(k <= q) & (k < 20) & (q - k < 30)")
    model = TritonModel(graph(case), None, tmp_path)
    step = Step(model, chunks_of([(0, 64), (60, 1)]))
    got, want = step.got(), step.want()
    assert np.isnan(want[-1]).all(), "the reference's row sees a key"
    check(got, want, 2e-5)


# --- bits


def test_bits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    model = TritonModel(graph(Case(6, 2, 40, sinks=True)), None, tmp_path)
    chunks = chunks_of([(0, 50), (300, 1), (280, 40)])
    batch = np.split(Step(model, chunks).got(), np.cumsum([len(c.ids) for c in chunks])[:-1])
    for chunk, row in zip(chunks, batch, strict=True):
        assert np.array_equal(_alone(model, chunks, chunk), row)


def _alone(model: TritonModel, chunks: list[Chunk], chunk: Chunk) -> Array:
    """A request by itself, over the cache of the whole step."""
    whole = Step(model, chunks)
    cache = model.cache(BLOCKS)
    for pool, kv, state in zip(cache, model.states, whole.states(), strict=True):
        encode(pool, kv, state)
    return model.step(cache, [chunk])


def multiply_by_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's product is numpy's, whose last bit depends on where in the matrix a row stands."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(self: Any, a: Any, b: Any, acc: Any, *_: Any) -> Any:
        product = np.stack([(row * b.data.T).sum(1) for row in a.data])
        return TensorHandle(product + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


INVARIANT = {
    "gqa": Case(6, 2, 40),
    "mha": Case(1, 1, 64, sinks=True),
    "window": Case(4, 1, 32, mask="(k <= q) & (q - k < 150)"),
    "general": Case(2, 1, 32, mask="(k <= q) & (mod(q + 3*k, 5) < 2)", slopes=True, softcap=5.0),
    "distances": Case(4, 2, 32, distances=23),
    "not_causal": Case(2, 1, 32, mask="(k < q + 1) & (q - k < 300) & (k < 500)"),
}
CUTS = [0, 21, 37, 255, 290, 291, 300]


@pytest.mark.parametrize("name", INVARIANT)
def test_invariant_bits_do_not_depend_on_chunking_or_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model = TritonModel(graph(INVARIANT[name]), None, tmp_path, invariant=True)
    multiply_by_element(monkeypatch)
    (whole,) = chunks_of([(0, 300)])
    want = model.step(model.cache(BLOCKS), [whole])
    free = [b for b in range(BLOCKS) if b not in whole.table]
    other = Chunk(free[:3], 0, list(range(40)))
    cache, got = model.cache(BLOCKS), []
    for first, last in zip(CUTS[:-1], CUTS[1:], strict=True):
        chunk = Chunk(whole.table[: -(-last // 16)], first, whole.ids[first:last])
        step = [chunk] if last % 2 else [other, chunk]
        got.append(model.step(cache, step)[-len(chunk.ids) :])
    assert np.array_equal(np.concatenate(got), want)


def test_the_two_ways_of_parts_differ_without_invariance(tmp_path: Path) -> None:
    """That the test above could fail."""
    model: Any = TritonModel(graph(Case(6, 2, 40)), None, tmp_path)
    (whole,) = chunks_of([(0, 300)])
    want = model.step(model.cache(BLOCKS), [whole])
    cache = model.cache(BLOCKS)
    model.step(cache, [Chunk(whole.table, 0, whole.ids[:299])])
    assert not np.array_equal(model.step(cache, [Chunk(whole.table, 299, whole.ids[299:])]), want[299:])
