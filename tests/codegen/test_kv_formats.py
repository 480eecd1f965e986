"""Quantised KV caches: codes as numpy chooses them, attention near float64, bits that no schedule changes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen import cpp
from codegen.kv_block import block_bytes
from ir.graph import Graph
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
    random_weights,
    weight,
)
from tests.codegen.kv_layout import decoded, quantized, read_stream, unpack
from tests.codegen.test_attention import _T, VOCAB, predicate

POOL_TOKENS = 2048
BROKEN = 0  # the token whose keys and values are not finite
F32, BF16, I8, F8, U4, U2 = DType.F32, DType.BF16, DType.I8, DType.F8E4M3, DType.U4, DType.U2


@dataclass(frozen=True)
class Case:
    key: DType
    value: DType
    block: int
    heads: int
    kv_heads: int
    size: int
    value_size: int
    tail: DType | None = None
    mask: str = "k <= q"
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    distances: int = 0

    @property
    def bias(self) -> tuple[int, ...]:
        """The shape of slopes, or of numbers by distance."""
        return (self.heads,) if self.slopes else (self.heads, self.distances) if self.distances else ()

    @property
    def kv(self) -> KV:
        per = "token" if self.tail is None else "channel"
        key = Stream("k", self.key, self.kv_heads, self.size, per)
        value = Stream("v", self.value, self.kv_heads, self.value_size)
        return KV((key, value), 1, self.block, self.window)

    @property
    def tail_kv(self) -> KV | None:
        if self.tail is None:
            return None
        streams = tuple(replace(s, dtype=self.tail, per="token") for s in self.kv.streams)
        return KV(streams, 1, self.block, tail=True)


CASES = {
    "i8 and f8": Case(I8, F8, 8, 3, 1, 64, 64, None, "(k <= q) & (q - k < 40)", 40, sinks=True),
    "f8 and i8": Case(F8, I8, 32, 2, 2, 80, 20, softcap=4.0, slopes=True),
    "u4 and u2": Case(U4, U2, 16, 3, 1, 16, 24, mask="(k <= q) & ((mod(q + 3*k, 5) < 2) | (k < 3))"),
    "u4 by channel": Case(U4, U4, 64, 6, 2, 64, 64, tail=BF16, distances=90),
    "u2 by channel": Case(U2, I8, 16, 3, 3, 20, 80, F32, "(k <= q) & (q - k < 40)", 40, 5.0, True, True),
}


def groups() -> list[tuple[str, KV]]:
    """Every case's cache, and after it its tail."""
    found = [(name, kv) for name, c in CASES.items() for kv in (c.kv, c.tail_kv) if kv is not None]
    return found


def graph() -> Graph:
    b, states = paged_builder(*(kv for _, kv in groups()), context=POOL_TOKENS)
    results, written = [], list(states)
    for name, c in CASES.items():
        g = [n for n, _ in groups()].index(name)
        shapes = [(c.heads, c.size), (c.kv_heads, c.size), (c.kv_heads, c.value_size)]
        q, k, v = (
            b.op(
                "reshape", b.op("embed", arg(b, "ids"), weight(f"{name}.{n}", VOCAB, h * d)), shape=(_T, h, d)
            )
            for n, (h, d) in zip("qkv", shapes, strict=True)
        )
        table, lens, starts = arg(b, f"table{g}"), arg(b, "lens"), arg(b, "starts")
        last = g + (c.tail is not None)  # where new tokens are written
        written[last] = b.op("kv_write", states[last], k, v, arg(b, f"slots{last}"), layer=0)
        tail: list[Any] = [None, None]
        if c.tail is not None:
            tail = [written[last], arg(b, f"table{last}")]
            written[g] = b.op("kv_seal", states[g], tail[0], table, tail[1], lens, starts, layer=0)
        extra = [
            weight(f"{name}.sinks", c.heads) if c.sinks else None,
            weight(f"{name}.bias", *c.bias) if c.bias else None,
        ]
        out = b.op("paged_attention", q, written[g], table, lens, starts, *extra, *tail, layer=0,
                   scale=3 * c.size**-0.5, mask=predicate(c.mask), softcap=c.softcap, loc=name)  # fmt: skip
        results.append(b.op("reshape", out, shape=(_T, c.heads * c.value_size)))
    return b.graph([b.op("concat", *results, axis=1), *written])


def columns(name: str) -> slice:
    widths = [c.heads * c.value_size for c in CASES.values()]
    i = list(CASES).index(name)
    return slice(sum(widths[:i]), sum(widths[: i + 1]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    of = graph()
    weights = random_weights(of, np.random.default_rng(), scale=1.0)
    for name, c in CASES.items():
        if c.slopes:
            weights[f"{name}.bias"] /= 20
        weights[f"{name}.k"][1] = 0.75  # a token whose keys are all alike
        weights[f"{name}.v"][2] = 0
        weights[f"{name}.k"][BROKEN, ::2], weights[f"{name}.v"][BROKEN, ::2] = np.nan, np.inf
    return Model(of, weights, tmp_path_factory.mktemp("formats"))


@dataclass
class Part(Chunk):
    """A request's part of a step. Its blocks lie in no order in the pool's tokens first..last."""

    first: int
    last: int

    def blocks(self, size: int) -> list[int]:
        share = np.arange(self.first // size, self.last // size)
        order = np.random.default_rng(self.first + size).permutation(share)
        return [int(b) for b in order[: -(-(self.before + len(self.ids)) // size)]]


@dataclass(frozen=True)
class Request:
    ids: list[int]
    first: int = 0
    last: int = POOL_TOKENS

    def chunk(self, begin: int, end: int) -> Part:
        return Part([], begin, self.ids[begin:end], self.first, self.last)

    def chunks(self, size: int, begin: int = 0) -> list[Part]:
        return [self.chunk(i, min(i + size, len(self.ids))) for i in range(begin, len(self.ids), size)]


def requests(*lengths: int) -> list[Request]:
    found, first = [], 0
    for n in lengths:
        last = first + -(-n // 64) * 64
        found.append(Request([int(i) for i in np.random.default_rng(n).integers(1, VOCAB, n)], first, last))
        first = last
    return found


def run(model: Model, steps: Sequence[Sequence[Chunk]], threads: int = 2) -> tuple[Array, list[Array]]:
    """The rows of all steps, and the pools after them, [blocks, bytes] of each group."""
    engine = model.open(threads)
    pools = [aligned(POOL_TOKENS // kv.block * block_bytes(kv), np.uint8, 255) for _, kv in groups()]
    rows = np.concatenate([model.step(engine, pools, chunks, stride=POOL_TOKENS // 8) for chunks in steps])
    model.library.octavo_close(engine)
    return rows, [p.reshape(-1, block_bytes(kv)) for p, (_, kv) in zip(pools, groups(), strict=True)]


def fresh(model: Model, name: str, request: Request) -> list[Array]:
    """Keys and values as they come: [tokens, heads, size] each."""
    return [
        model.weights[f"{name}.{s.name}"][request.ids].reshape(-1, s.heads, s.head_size)
        for s in CASES[name].kv.streams
    ]


def held(model: Model, name: str, pools: list[Array], request: Request) -> tuple[list[Array], list[Array]]:
    """Keys and values in float64, as the cache decodes to them and as the tail keeps them."""
    c, blocks = CASES[name], request.chunk(0, len(request.ids)).blocks(CASES[name].block)
    pool = pools[[n for n, _ in groups()].index(name)][blocks]
    with np.errstate(invalid="ignore"):
        cached = [decoded(read_stream(c.kv, i, pool), s) for i, s in enumerate(c.kv.streams)]
    rows = [x.reshape(-1, *x.shape[2:])[: len(request.ids)] for x in cached]
    dtype = (c.tail or F32).numpy
    return rows, [x.astype(dtype).astype(np.float64) for x in fresh(model, name, request)]


def expected(model: Model, name: str, pools: list[Array], request: Request, at: Array) -> Array:
    """The attention of the queries at positions `at` in float64: [queries, heads * value_size]."""
    c = CASES[name]
    (k, v), (own_k, own_v) = held(model, name, pools, request)
    q = model.weights[f"{name}.q"][request.ids].reshape(-1, c.heads, c.size).astype(np.float64)
    return np.stack([_expected(model.weights, name, q[p], p, (k, v), (own_k, own_v)) for p in at])


def _expected(weights: Any, name: str, q: Array, p: int, cached: Any, exact: Any) -> Array:
    """Of the query q [heads, size] at position p; cached and exact: keys and values [tokens, heads, size]."""
    c = CASES[name]
    own = p // c.block * c.block if c.tail else p + 1
    k, v = (np.concatenate([a[:own], b[own : p + 1]]) for a, b in zip(cached, exact, strict=True))
    k, v = (np.repeat(a, c.heads // c.kv_heads, 1).transpose(1, 0, 2) for a in (k, v))
    at = np.arange(p + 1)
    seen = np.ones(p + 1, bool) if c.window is None else p - at < c.window
    seen = ((p + 3 * at) % 5 < 2) | (at < 3) if "mod" in c.mask else seen
    s = (k @ q[:, :, None])[..., 0] * (3 * c.size**-0.5)
    s = c.softcap * np.tanh(s / c.softcap) if c.softcap else s
    s = s + weights[f"{name}.bias"][:, None] * (at - p) if c.slopes else s
    if c.distances:
        s = s + weights[f"{name}.bias"][:, np.minimum(p - at, c.distances - 1)]
    s = np.where(seen, s, -np.inf)
    sinks = weights[f"{name}.sinks"][:, None] if c.sinks else np.full((c.heads, 1), -np.inf)
    e = np.exp(np.concatenate([s, sinks], 1) - np.maximum(s.max(1, keepdims=True), sinks))
    e /= e.sum(1, keepdims=True)
    return (e[:, None, :-1] @ v).reshape(-1)


@pytest.mark.parametrize("name", CASES)
def test_codes_are_those_of_numpy(model: Model, name: str) -> None:
    request = requests(601)[0]
    _, pools = run(model, [[chunk] for chunk in request.chunks(61)])
    c, blocks = CASES[name], request.chunk(0, 601).blocks(CASES[name].block)
    pool = pools[[n for n, _ in groups()].index(name)]
    count = 601 // c.block if c.tail else -(-601 // c.block)
    for index, (s, x) in enumerate(zip(c.kv.streams, fresh(model, name, request), strict=True)):
        x = x.astype((c.tail or F32).numpy)
        got = read_stream(c.kv, index, pool[blocks])
        for b in range(count):
            tokens = x[b * c.block : (b + 1) * c.block]
            want = quantized(tokens, s)
            assert np.array_equal(got["codes"][b][: len(tokens)], want["codes"])
            for part in set(want) - {"codes"}:
                found = got[part][b] if s.per == "channel" else got[part][b].T[: len(tokens)]
                assert np.array_equal(found, want[part]), part
    others = np.delete(pool, blocks[:count], 0)
    assert (others == 255).all(), "wrote outside the request's blocks"


@pytest.mark.parametrize("name", CASES)
def test_slots_without_a_token_stay_as_they_are(model: Model, name: str) -> None:
    c, request = CASES[name], requests(5)[0]
    _, pools = run(model, [[request.chunk(0, 5)]])
    pool = pools[[n for n, _ in groups()].index(name)]
    if c.tail:
        assert (pool == 255).all()
        return
    for index, s in enumerate(c.kv.streams):
        got = read_stream(c.kv, index, pool[request.chunk(0, 5).blocks(c.block)])
        assert (got["codes"][0, 5:].view(np.uint8) == (1 << s.dtype.bits) - 1).all()
        assert np.isnan(got["scale"][0].T[5:]).all()


@pytest.mark.parametrize("lengths", [(1, 15, 16, 17, 63, 64, 65, 127), (599, 257)])
def test_close_to_float64(model: Model, lengths: tuple[int, ...]) -> None:
    batch = requests(*lengths)
    rows, pools = run(model, [[r.chunk(0, len(r.ids)) for r in batch]])
    parts = np.split(rows, np.cumsum(lengths)[:-1])
    queries = [
        np.unique(np.r_[np.random.default_rng().integers(0, n, 40), n - 1, max(0, n - 70)]) for n in lengths
    ]
    for name in CASES:
        got = np.concatenate([p[at, columns(name)] for p, at in zip(parts, queries, strict=True)])
        want = [expected(model, name, pools, r, at) for r, at in zip(batch, queries, strict=True)]
        assert np.abs(got - np.concatenate(want)).max() < 3e-5 * got.std(), name


def test_bits_do_not_depend_on_the_batch_or_the_threads(model: Model) -> None:
    lengths = (1, 15, 64, 67, 131)
    batch = requests(*lengths)
    alone = np.concatenate([run(model, [[r.chunk(0, len(r.ids))]], 1)[0] for r in batch])
    for threads in (1, 2, 3):
        rows, _ = run(model, [[r.chunk(0, len(r.ids)) for r in batch]], threads)
        assert np.array_equal(rows, alone), threads


@pytest.mark.parametrize("size", [1, 7, 16, 64])
def test_bits_do_not_depend_on_chunking(model: Model, size: int) -> None:
    request = requests(211)[0]
    want, whole = run(model, [[request.chunk(0, 211)]])
    got, cut = run(model, [[chunk] for chunk in request.chunks(size)], threads=3)
    assert np.array_equal(got, want)
    assert all(np.array_equal(a, b) for a, b in zip(whole, cut, strict=True)), "the caches differ"


def test_partitions_computed_apart_have_the_bits_of_partitions_in_a_row(model: Model) -> None:
    batch = requests(710, 300)
    want = np.concatenate([run(model, [[r.chunk(0, len(r.ids))]])[0][-2:] for r in batch])
    heads, tails = [r.chunk(0, len(r.ids) - 2) for r in batch], [r.chunks(1, len(r.ids) - 2) for r in batch]
    for threads in (1, 3):
        rows, _ = run(model, [heads, [t[0] for t in tails], [t[1] for t in tails]], threads)
        got = rows[-4:][[0, 2, 1, 3]]
        assert np.array_equal(got, want)


def test_what_is_not_finite_stays_visible(model: Model) -> None:
    request = Request([*requests(70)[0].ids, BROKEN, 5])
    rows, _ = run(model, [[request.chunk(0, 72)]])
    for name in CASES:
        assert np.isfinite(rows[:70, columns(name)]).all() and not np.isfinite(rows[71, columns(name)]).any()


SOURCE = """
#include "abi.h"
#include "kv_write.h"
using namespace octavo;
#define CODES(T)                                                                              \\
  extern "C" OCTAVO_EXPORT void encode_##T(const float* x, int64_t n, char* codes, uint16_t* scales) {  \\
    kv::Scale s = kv::measure<kv::T>(x, n);                                                   \\
    scales[0] = s.scale.bits, scales[1] = s.minimum.bits;                                     \\
    write_value<kv::T>(x, n, s, codes);                                                       \\
  }                                                                                           \\
  extern "C" OCTAVO_EXPORT void decode_##T(const kv::T* codes, float* y) { store(y, kv::load_strip(codes)); }
CODES(i8) CODES(f8) CODES(u4) CODES(u2)
extern "C" OCTAVO_EXPORT void halves_i8(const kv::i8* a, const kv::i8* b, float* y) {
  store(y, kv::load_strip(a, b));
}
extern "C" OCTAVO_EXPORT void from_f16(const f16* x, float* y) { store(y, load(x)); }
extern "C" OCTAVO_EXPORT uint16_t into_f16(float x) { return to_f16(x).bits; }
"""
NAMES = {I8: "i8", F8: "f8", U4: "u4", U2: "u2"}


@pytest.mark.parametrize("level", levels())
def test_codes_at_every_level(tmp_path: Path, level: str) -> None:
    library = build_cpp(SOURCE, tmp_path, level)
    library.into_f16.argtypes, library.into_f16.restype = [ctypes.c_float], ctypes.c_uint16
    address = lambda a: ctypes.c_void_p(pointer(a))  # noqa: E731
    out = np.zeros(16, np.float32)
    rng = np.random.default_rng()
    every = np.arange(65536).astype(np.uint16)
    for i in range(0, 65536, 16):
        library.from_f16(address(every[i:]), address(out))
        assert np.array_equal(out, every[i : i + 16].view(np.float16).astype(np.float32), equal_nan=True)
    with np.errstate(over="ignore"):
        halfway = every[:31744:7].view(np.float16).astype(np.float32) * np.float32(1 + 2.0**-12)
        for x in (*halfway, 65519.9, 65520.0, 2.0**-25, 2.0**-24 * 1.5, -0.0, np.inf, -np.inf):
            assert library.into_f16(x) == np.float32(x).astype(np.float16).view(np.uint16), x
    for dtype, name in NAMES.items():
        for codes in np.arange(256).astype(np.uint8).reshape(-1, 16):
            finite = codes & ~np.uint8(1) if dtype is F8 else codes  # e4m3 has NaN where all bits are set
            getattr(library, f"decode_{name}")(address(finite), address(out))
            packed = dtype.bits < 8
            want = unpack(finite[: 2 * dtype.bits], dtype.bits) if packed else finite.view(dtype.numpy)
            assert np.array_equal(out * (256 if dtype is F8 else 1), want.astype(np.float32))
        for n in (1, 15, 16, 33, 80):
            x = (rng.standard_normal(n) * 10.0 ** rng.uniform(-9, 5)).astype(np.float32)
            codes, scales = np.zeros(96, np.uint8), np.zeros(2, np.uint16)
            getattr(library, f"encode_{name}")(address(x), ctypes.c_int64(n), address(codes), address(scales))
            want = quantized(x[None, None], Stream("v", dtype, 1, n))
            got = unpack(codes, dtype.bits)[:n] if dtype.bits < 8 else codes[:n].view(dtype.numpy)
            assert (
                np.array_equal(got, want["codes"][0, 0]) and scales[0] == want["scale"].view(np.uint16)[0, 0]
            )
            assert "minimum" not in want or scales[1] == want["minimum"].view(np.uint16)[0, 0]
    a, b = rng.integers(-128, 128, (2, 8)).astype(np.int8)
    library.halves_i8(address(a), address(b), address(out))
    assert np.array_equal(out, np.concatenate([a, b]).astype(np.float32))


@pytest.mark.parametrize(
    ("key", "value", "block", "why"),
    [
        (Stream("k", U4, 1, 16), Stream("v", I8, 1, 16), 8, "u4 in blocks of 8 tokens; they need 16 or more"),
        (
            Stream("k", DType.F16, 1, 16),
            Stream("v", I8, 1, 16),
            16,
            "stream k of f16; there are f32, bf16, i8",
        ),
    ],
)
def test_formats_without_a_kernel_are_refused(key: Stream, value: Stream, block: int, why: str) -> None:
    b, (state,) = paged_builder(KV((key, value), 1, block))
    k, v = (
        b.op("reshape", b.op("embed", arg(b, "ids"), weight(n, VOCAB, 16)), shape=(_T, 1, 16)) for n in "kv"
    )
    state = b.op("kv_write", state, k, v, arg(b, "slots0"), layer=0)
    with pytest.raises(cpp.CodegenError, match=why):
        cpp.generate(lower(b.graph([k, state])))
