"""Paged attention against float64, over poisoned caches; and the same bits however the work is cut up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from ir.graph import Graph
from ir.text import parse
from ir.types import KV, DType, Stream
from tests.codegen.harness import (
    Chunk,
    Model,
    arg,
    empty_states,
    paged_builder,
    reference_step,
    weight,
)

VOCAB = 50
BLOCKS = 96


@dataclass(frozen=True)
class Case:
    heads: int
    kv_heads: int
    size: int
    value_size: int = 0
    mask: str = "k <= q"
    dtype: DType = DType.F32
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    distances: int = 0
    table: bool = False

    @property
    def bias(self) -> tuple[int, ...]:
        """The shape of slopes, or of numbers by distance."""
        return (self.heads,) if self.slopes else (self.heads, self.distances) if self.distances else ()

    @property
    def kv(self) -> KV:
        value = self.value_size or self.size
        return KV(
            (
                Stream("k", self.dtype, self.kv_heads, self.size),
                Stream("v", self.dtype, self.kv_heads, value),
            ),
            1,
        )


CASES = {
    "mha_32": Case(2, 2, 32),
    "gqa_40": Case(6, 2, 40),
    "gqa_64": Case(9, 3, 64),
    "mqa_80": Case(7, 1, 80),
    "gqa_96": Case(4, 2, 96),
    "mha_128": Case(2, 2, 128),
    "mha_256": Case(1, 1, 256),
    "odd": Case(3, 1, 5, 20),
    "bf16": Case(4, 2, 24, dtype=DType.BF16),
    "window": Case(4, 2, 16, mask="(k <= q) & (q - k < 24)"),
    "wide_window": Case(4, 2, 16, mask="(k <= q) & (q - k < 200)"),
    "chunks": Case(2, 1, 16, mask="(k <= q) & ((k // 24) == (q // 24))"),
    "general": Case(2, 1, 16, mask="(k <= q) & ((mod(q + 3*k, 5) < 2) | (k < 3))"),
    "table": Case(2, 2, 16, mask="(k <= q) & Table(0, mod(q, 7), mod(k, 5))", table=True),
    "softcap": Case(2, 1, 16, softcap=3.0),
    "sinks": Case(4, 2, 16, sinks=True),
    "slopes": Case(4, 4, 16, slopes=True, softcap=5.0),
    "few_distances": Case(4, 2, 16, distances=23, softcap=5.0),
    "one_distance": Case(2, 1, 16, distances=1),
    "distances": Case(6, 2, 40, distances=700, sinks=True),
    "distances_window": Case(3, 1, 16, mask="(k <= q) & (q - k < 21)", distances=18, dtype=DType.BF16),
}


def predicate(text: str) -> object:
    """A mask predicate, read by the IR's own grammar."""
    case = (
        "graph @m(%q: f32[1,1,S,2]) dims {S: 1..9} {\n"
        "  %o = attention %q, %q, %q {scale=1.0, mask=MASK} : f32[1,S,1,2]\n  return %o\n}\n"
    )
    return parse(case.replace("MASK", text)).ops[0].attrs["mask"]


def graph() -> Graph:
    b, states = paged_builder(*(c.kv for c in CASES.values()))
    results, written = [], []
    for g, (name, c) in enumerate(CASES.items()):
        kv = c.kv
        rows = [(c.heads, c.size), *((s.heads, s.head_size) for s in kv.streams)]
        q, k, v = (
            b.op(
                "reshape", b.op("embed", arg(b, "ids"), weight(f"{name}.{n}", VOCAB, h * d)), shape=(_T, h, d)
            )
            for n, (h, d) in zip("qkv", rows, strict=True)
        )
        state = b.op("kv_write", states[g], k, v, arg(b, f"slots{g}"), layer=0)
        extra = [
            weight(f"{name}.sinks", c.heads) if c.sinks else None,
            weight(f"{name}.bias", *c.bias) if c.bias else None,
        ]
        extra += [None, None, weight(f"{name}.table", 7, 5, dtype=DType.BOOL)] if c.table else []
        step = (arg(b, f"table{g}"), arg(b, "lens"), arg(b, "starts"))
        out = b.op("paged_attention", q, state, *step, *extra, layer=0,
                   scale=3 * c.size**-0.5, mask=predicate(c.mask), softcap=c.softcap, loc=name)  # fmt: skip
        width = c.heads * kv.streams[1].head_size
        results.append(b.op("reshape", out, shape=(_T, width)))
        written.append(state)
    return b.graph([b.op("concat", *results, axis=1), *written])


_T = arg(paged_builder()[0], "ids").type.shape[0]  # type: ignore[union-attr]


def columns() -> dict[str, slice]:
    found, start = {}, 0
    for name, c in CASES.items():
        width = c.heads * c.kv.streams[1].head_size
        found[name] = slice(start, start + width)
        start += width
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(graph(), None, tmp_path_factory.mktemp("attention"))


def tokens(count: int, seed: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, count)]


def blocks(count: int, first: int) -> list[int]:
    """Blocks in no order."""
    return [int(b) for b in np.random.default_rng(first).permutation(count) + first]


@dataclass
class Request:
    ids: list[int]
    table: list[int]

    def chunk(self, first: int, last: int) -> Chunk:
        return Chunk(self.table[: -(-last // 16)], first, self.ids[first:last])


def requests() -> list[Request]:
    lengths, found, first = (1, 15, 16, 17, 31, 70, 140), [], 0
    for length in lengths:
        count = -(-length // 16)
        found.append(Request(tokens(length, length), blocks(count, first)))
        first += count
    return found


def whole(model: Model, batch: list[Request], threads: int) -> list[np.ndarray]:
    engine = model.open(threads)
    out = model.step(engine, model.cache(BLOCKS), [r.chunk(0, len(r.ids)) for r in batch])
    model.library.octavo_close(engine)
    return np.split(out, np.cumsum([len(r.ids) for r in batch])[:-1])


@pytest.fixture(scope="module")
def reference(model: Model) -> np.ndarray:
    batch = requests()
    chunks = [r.chunk(0, len(r.ids)) for r in batch]
    with np.errstate(invalid="ignore"):
        return reference_step(model.graph, model.weights, empty_states(model.graph, BLOCKS), chunks)[0]


@pytest.mark.parametrize("name", CASES)
def test_close_to_float64(model: Model, reference: np.ndarray, name: str) -> None:
    got = np.concatenate(whole(model, requests(), 2))[:, columns()[name]]
    want = reference[:, columns()[name]]
    seen = ~np.isnan(want).any(1)  # the reference divides nothing by nothing where a row sees no key
    assert np.isfinite(got).all() and seen.mean() > 0.9
    bound = 2e-5 if CASES[name].dtype is DType.F32 else 2e-2
    assert np.abs(got[seen] - want[seen]).max() < bound * want[seen].std()


def test_bits_do_not_depend_on_the_batch_or_the_threads(model: Model) -> None:
    batch = requests()
    alone = [whole(model, [r], 1)[0] for r in batch]
    for threads in (1, 2, 3):
        for got, want in zip(whole(model, batch, threads), alone, strict=True):
            assert np.array_equal(got, want)


@pytest.mark.parametrize("size", [1, 5, 16, 33])
def test_bits_do_not_depend_on_chunking(model: Model, size: int) -> None:
    request = requests()[-1]
    (want,) = whole(model, [request], 2)
    engine, cache = model.open(2), model.cache(BLOCKS)
    got = [
        model.step(engine, cache, [request.chunk(i, min(i + size, len(request.ids)))])
        for i in range(0, len(request.ids), size)
    ]
    model.library.octavo_close(engine)
    assert np.array_equal(np.concatenate(got), want)


def test_partitions_computed_apart_have_the_bits_of_partitions_in_a_row(model: Model) -> None:
    request = Request(tokens(700, 3), blocks(44, 0))
    (want,) = whole(model, [request], 2)
    for threads in (1, 3):
        engine, cache = model.open(threads), model.cache(BLOCKS)
        model.step(engine, cache, [request.chunk(0, 690)])
        got = [
            model.step(engine, cache, [request.chunk(i, i + n)]) for i, n in ((690, 1), (691, 1), (692, 8))
        ]
        model.library.octavo_close(engine)
        assert np.array_equal(np.concatenate(got), want[690:])


@pytest.mark.parametrize("length", [255, 256, 257, 600])
def test_close_to_float64_over_partitions(model: Model, length: int) -> None:
    chunk = Request(tokens(length, length), blocks(-(-length // 16), 0)).chunk(0, length)
    engine = model.open(2)
    got = model.step(engine, model.cache(BLOCKS), [chunk])[-40:]
    model.library.octavo_close(engine)
    with np.errstate(invalid="ignore"):
        want = reference_step(model.graph, model.weights, empty_states(model.graph, BLOCKS), [chunk])[0][-40:]
    for name, case in CASES.items():
        seen = ~np.isnan(want[:, columns()[name]]).any(1)
        assert seen.mean() > 0.8
        a, b = got[seen, columns()[name]], want[seen, columns()[name]]
        bound = 2e-5 if case.dtype is DType.F32 else 2e-2
        assert np.abs(a - b).max() < bound * b.std(), name


def test_requests_of_unequal_lengths_decode_as_alone(model: Model) -> None:
    batch = [
        Request(tokens(n, n), blocks(-(-n // 16), f)) for n, f in ((3, 0), (690, 1), (257, 45), (40, 63))
    ]
    last = [r.chunk(len(r.ids) - 1, len(r.ids)) for r in batch]
    got = []
    for threads, steps in ((1, [[c] for c in last]), (2, [last]), (3, [last])):
        engine, cache = model.open(threads), model.cache(BLOCKS)
        model.step(engine, cache, [r.chunk(0, len(r.ids) - 1) for r in batch])
        got.append(np.concatenate([model.step(engine, cache, chunks) for chunks in steps]))
        model.library.octavo_close(engine)
    assert np.array_equal(got[0], got[1]) and np.array_equal(got[0], got[2])


def test_keys_after_a_query_change_nothing(model: Model) -> None:
    request, longer = requests()[4], Request(tokens(31, 31) + tokens(9, 99), requests()[4].table + [90])
    assert np.array_equal(whole(model, [request], 2)[0], whole(model, [longer], 2)[0][:31])


def test_the_cache_holds_what_was_written(model: Model) -> None:
    request = requests()[5]
    engine, cache = model.open(2), model.cache(BLOCKS)
    model.step(engine, cache, [request.chunk(0, 70)])
    model.library.octavo_close(engine)
    for g, (name, c) in enumerate(CASES.items()):
        state = model.decode_cache(cache[g], g, BLOCKS)
        for stream, size in (("k", c.size), ("v", c.value_size or c.size)):
            rows = state[stream][0].reshape(-1, c.kv_heads, size)
            slots = [request.table[p // 16] * 16 + p % 16 for p in range(70)]
            want = model.weights[f"{name}.{stream}"][request.ids].reshape(70, c.kv_heads, size)
            assert np.array_equal(
                rows[slots].astype(np.float32), want.astype(c.dtype.numpy).astype(np.float32)
            )
            others = np.delete(rows.astype(np.float32), slots, axis=0)
            assert np.isnan(others).all(), "wrote outside the request's slots"
