"""Attention over quantised caches under Triton's interpreter: steps that write, seal and read, against
softmaxes in float64 over what the formats say that a cache holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ir.graph import Graph, Value
from ir.types import CHANNEL, KV, DType, Stream
from tests.codegen import test_attention as shared
from tests.codegen.harness import Array, Chunk, arg, paged_builder, random_weights, weight
from tests.codegen.test_attention import predicate
from tests.triton.harness import TritonModel
from tests.triton.kv_reference import decoded, encoded
from tests.triton.test_attention import multiply_by_element

I8, F8, U4, U2, BF16, F32 = DType.I8, DType.F8E4M3, DType.U4, DType.U2, DType.BF16, DType.F32
POOL_TOKENS, VOCAB = 1024, 60
ERROR = 2e-5  # of the standard deviation


@dataclass(frozen=True)
class Case:
    """k and v: types, and whether scales are a block's channels'. tail: the type of what is not sealed."""

    k: tuple[DType, bool]
    v: tuple[DType, bool]
    heads: int = 2
    kv_heads: int = 1
    size: int = 64
    value_size: int = 0
    block: int = 16
    tail: DType = BF16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    distances: int = 0

    @property
    def bias(self) -> tuple[int, ...]:
        """The shape of slopes, or of numbers by distance."""
        return (self.heads,) if self.slopes else (self.heads, self.distances) if self.distances else ()

    def streams(self) -> tuple[Stream, Stream]:
        (k, k_per), (v, v_per) = self.k, self.v
        per = {True: CHANNEL, False: "token"}
        value_size = self.value_size or self.size
        return (
            Stream("k", k, self.kv_heads, self.size, per[k_per]),
            Stream("v", v, self.kv_heads, value_size, per[v_per]),
        )

    @property
    def kv(self) -> KV:
        return KV(self.streams(), 2, self.block)

    @property
    def has_tail(self) -> bool:
        return self.k[1] or self.v[1]

    @property
    def states(self) -> list[KV]:
        if not self.has_tail:
            return [self.kv]
        exact = tuple(replace(s, dtype=self.tail, per="token") for s in self.streams())
        return [self.kv, replace(self.kv, streams=exact, tail=True)]

    @property
    def width(self) -> int:
        return self.heads * self.streams()[1].head_size

    @property
    def mask(self) -> str:
        return "k <= q" if not self.window else f"(k <= q) & (q - k < {self.window})"


CASES = {
    "i8": Case((I8, False), (I8, False), 3, 1, 40, block=64),
    "f8": Case((F8, False), (F8, False), 4, 2, 33, 17, window=50, sinks=True),
    "u4": Case((U4, False), (U4, False), 1, 1, 20, block=8),
    "u2": Case((U2, False), (U2, False), 2, 1, 64, softcap=3.0),
    "i8 keys, plain values": Case((I8, False), (BF16, False), slopes=True),
    "u4 kivi": Case((U4, True), (U4, False), 4, 2, 40, block=64, distances=90),
    "u2 kivi": Case((U2, True), (U2, False), 6, 1, 33, block=16, tail=F32, sinks=True),
    "u4 windowed": Case((U4, True), (I8, False), 2, 1, 17, 48, block=16, window=37),
    "channels of values": Case((U4, True), (U4, True), 2, 1, 16, 24, block=32),
}
# Tokens before and in a step of each of two requests: prompts in chunks, over several blocks, and decoding.
STEPS = [
    [(0, 127), (0, 7)],
    [(127, 1), (7, 9)],
    [(128, 1), (16, 1)],
    [(129, 17), (17, 0)],
]


def graph(cases: dict[str, Case], context: int = 512) -> Graph:
    b, inputs = paged_builder(*(kv for c in cases.values() for kv in c.states), context=context)
    results: list[Value] = []
    states = {f"kv{i}": value for i, value in enumerate(inputs)}
    at = 0
    for name, c in cases.items():
        results.append(attention(b, name, c, states, at))
        at += len(c.states)
    out = b.op("concat", *results, axis=1) if len(results) > 1 else results[0]
    return b.graph([out, *states.values()])


def attention(b: Any, name: str, c: Case, states: dict[str, Value], at: int) -> Value:
    """One layer, the second of two in the cache: group `at`, and the tail's behind it."""
    ids, shapes = arg(b, "ids"), [(c.heads, c.size), *((s.heads, s.head_size) for s in c.streams())]
    q, *kv = (
        b.op("reshape", b.op("embed", ids, weight(f"{name}.{n}", VOCAB, h * d)), shape=(shared._T, h, d))
        for n, (h, d) in zip("qkv", shapes, strict=True)
    )
    step = (arg(b, f"table{at}"), arg(b, "lens"), arg(b, "starts"))
    tail: list[Value | None] = [None, None]
    if c.has_tail:
        exact = b.op("kv_write", states[f"kv{at + 1}"], *kv, arg(b, f"slots{at + 1}"), layer=1)
        tail = [exact, arg(b, f"table{at + 1}")]
        state = b.op("kv_seal", states[f"kv{at}"], exact, step[0], tail[1], *step[1:], layer=1)
        states[f"kv{at + 1}"] = exact
    else:
        state = b.op("kv_write", states[f"kv{at}"], *kv, arg(b, f"slots{at}"), layer=1)
    states[f"kv{at}"] = state
    extra = [
        weight(f"{name}.sinks", c.heads) if c.sinks else None,
        weight(f"{name}.bias", *c.bias) if c.bias else None,
    ]
    out = b.op("paged_attention", q, state, *step, *extra, *tail, layer=1, scale=3 * c.size**-0.5,
               mask=predicate(c.mask), softcap=c.softcap)  # fmt: skip
    return b.op("reshape", out, shape=(shared._T, c.width))


@dataclass
class Blocks(Chunk):
    """A request's part of a step. order: a pool's blocks that it may take, for every block size."""

    order: Any = None
    exact: bool = False

    def blocks(self, size: int) -> list[int]:
        """In a tail those before the first token's are gone."""
        used = -(-(self.before + len(self.ids)) // size)
        found = [int(i) for i in self.order[size][:used]]
        gone = self.before // size if self.exact else 0
        return [-(1 << 30)] * gone + found[gone:]


def requests(count: int, tokens: int) -> tuple[list[list[int]], list[list[dict[int, Array]]]]:
    """Ids of requests, and where their blocks lie: in caches, in tails."""
    rng = np.random.default_rng(0)
    ids = [[int(i) for i in rng.integers(0, VOCAB, tokens)] for _ in range(count)]
    orders = []
    for _ in range(2):
        pools = {size: rng.permutation(POOL_TOKENS // size) for size in (8, 16, 32, 64)}
        orders.append([{n: o[i * len(o) // count :] for n, o in pools.items()} for i in range(count)])
    return ids, orders


def run(model: TritonModel, steps: list[list[tuple[int, int]]], ids: Any, orders: Any) -> list[Array]:
    """Each request's rows over all steps; caches start poisoned."""
    cache = [model_cache(model, i) for i in range(len(model.states))]
    rows: list[list[Array]] = [[] for _ in ids]
    for step in steps:
        chunks, tails = (
            [
                Blocks([], before, ids[r][before : before + count], orders[tail][r], bool(tail))
                for r, (before, count) in enumerate(step)
            ]
            for tail in (0, 1)
        )
        out = model.step(cache, chunks, stride=128, tails=tails)
        ends = np.cumsum([count for _, count in step])
        for r, part in enumerate(np.split(out, ends[:-1])):
            rows[r].append(part)
    return [np.concatenate(parts) for parts in rows]


def model_cache(model: TritonModel, index: int) -> Array:
    return model.cache(POOL_TOKENS // model.states[index].block)[index]


# --- the reference


def held(x: Array, stream: Stream, c: Case, query: int) -> Array:
    """What a query sees of keys or values x [tokens, heads, size]."""
    keys = x[: query + 1]
    if not c.has_tail:
        return decoded(encoded(keys, stream), stream)
    first = query // c.block * c.block
    own = keys[first:].astype(c.tail.numpy).astype(np.float64)
    exact = x.astype(c.tail.numpy).astype(np.float32)
    sealed = [decoded(encoded(exact[i : i + c.block], stream), stream) for i in range(0, first, c.block)]
    return np.concatenate([*sealed, own])


def attend(name: str, c: Case, given: dict[str, Array], ids: list[int]) -> Array:
    """Rows of all of a request's tokens, in float64."""
    shapes = [(c.heads, c.size), *((s.heads, s.head_size) for s in c.streams())]
    q, *kv = (given[f"{name}.{n}"][ids].reshape(-1, h, d) for n, (h, d) in zip("qkv", shapes, strict=True))
    out = []
    for query in range(len(ids)):
        k, v = (held(x, s, c, query) for x, s in zip(kv, c.streams(), strict=True))
        low = max(0, query - c.window + 1) if c.window else 0
        k, v = (np.repeat(x[low:], c.heads // c.kv_heads, 1) for x in (k, v))
        scores = np.einsum("hd,khd->hk", q[query].astype(np.float64), k) * 3 * c.size**-0.5
        scores = c.softcap * np.tanh(scores / c.softcap) if c.softcap else scores
        if c.slopes:
            distance = np.arange(low, query + 1) - query
            scores += given[f"{name}.bias"].astype(np.float64)[:, None] * distance
        if c.distances:
            distance = np.minimum(query - np.arange(low, query + 1), c.distances - 1)
            scores += given[f"{name}.bias"].astype(np.float64)[:, distance]
        sinks = given[f"{name}.sinks"].astype(np.float64) if c.sinks else np.full(c.heads, -np.inf)
        top = np.maximum(scores.max(1), sinks)
        p = np.exp(scores - top[:, None])
        total = p.sum(1) + np.exp(sinks - top)
        out.append(np.einsum("hk,khd->hd", p / total[:, None], v).ravel())
    return np.array(out)


def model_of(cases: dict[str, Case], directory: Path, context: int = 512, **options: Any) -> TritonModel:
    """Sinks are about as large as the largest scores."""
    made = graph(cases, context)
    weights = random_weights(made, np.random.default_rng(0))
    weights |= {name: array + 1 for name, array in weights.items() if name.endswith("sinks")}
    return TritonModel(made, weights, directory, **options)


@pytest.fixture(scope="module")
def every_case(tmp_path_factory: pytest.TempPathFactory) -> TritonModel:
    return model_of(CASES, tmp_path_factory.mktemp("attention"))


def test_every_format_is_close_to_float64_over_mixed_steps(every_case: TritonModel) -> None:
    ids, orders = requests(2, 146)
    got, start = run(every_case, STEPS, ids, orders), 0
    for name, c in CASES.items():
        part, start = slice(start, start + c.width), start + c.width
        for rows, tokens in zip(got, ids, strict=True):
            want = attend(name, c, every_case.weights, tokens[: len(rows)])
            assert np.abs(rows[:, part] - want).max() < ERROR * want.std(), name


INVARIANT = {
    "i8": Case((I8, False), (U4, False), 2, 1, 16, block=32),
    "u4 kivi": Case((U4, True), (U4, False), 2, 1, 24, block=64, sinks=True),
    "u2 windowed": Case((U2, True), (I8, False), 1, 1, 16, block=16, window=90),
}
CUTS = [0, 21, 63, 64, 255, 290, 291, 300]


@pytest.mark.parametrize("context", [512, 128])
def test_invariant_bits_do_not_depend_on_chunking_or_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    """In a context of 128 tokens keys are not split into parts."""
    cases = INVARIANT if context == 512 else {"sinks": Case((F8, False), (F8, False), 2, 1, 16, sinks=True)}
    model = model_of(cases, tmp_path, context, invariant=True)
    multiply_by_element(monkeypatch)
    ids, orders = requests(2, 300)
    cuts = CUTS if context == 512 else [0, 1, 2, 3, 5, 64, 120]
    whole, _ = run(model, [[(0, cuts[-1]), (0, 0)]], ids, orders)
    ends, at = list(zip(cuts[:-1], cuts[1:], strict=True)), [0, 30, 31, 70]
    steps = [[(first, last - first), (0, 0)] for first, last in ends]
    for i, (before, after) in enumerate(zip(at[:-1], at[1:], strict=True)):
        steps[i + 1 if i + 1 < len(steps) else i][1] = (before, after - before)
    got, _ = run(model, steps, ids, orders)
    assert np.array_equal(got, whole)
