"""Kernels that store bf16: the bits are those of the f32 result, rounded as ml_dtypes rounds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Value, tensor_of
from ir.predicates import CAUSAL
from ir.types import KV, DType, Stream
from tests.codegen.harness import Array, Chunk, Model, arg, levels, paged_builder, random_weights, weight

T = symbol("T")
VOCAB = 40
ODD = np.array(
    # two ties, just above a tie, the largest number, the smallest, -inf, a signalling NaN, all ones
    [0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x00000001, 0xFF800000, 0x7F800001, 0xBF80FFFF],
    np.uint32,
).view(np.float32)
STATE = KV((Stream("k", DType.F32, 2, 16), Stream("v", DType.F32, 2, 20)), layers=1, block=16)
Case = Callable[[GraphBuilder, str | None], Value]


def embedded(b: GraphBuilder, name: str, width: int) -> Value:
    return b.op("embed", arg(b, "ids"), weight(name, VOCAB, width))


def rows(b: GraphBuilder, width: int) -> Value:
    return embedded(b, f"table{width}", width)


def rms(b: GraphBuilder, dtype: str | None) -> Value:
    return b.op("rms_norm", rows(b, 37), weight("rms.w", 37), eps=1e-5, dtype=dtype)


def layer(b: GraphBuilder, dtype: str | None) -> Value:
    x = b.op("reshape", rows(b, 42), shape=(T, 2, 21))
    return b.op("layer_norm", x, weight("ln.w", 21), weight("ln.b", 21), eps=1e-5, dtype=dtype)


def linear(b: GraphBuilder, dtype: str | None) -> Value:
    bias = weight("lin.b", 41)
    return b.op("linear", rows(b, 19), weight("lin.w", 41, 19), bias, activation="gelu", dtype=dtype)


def gated(b: GraphBuilder, dtype: str | None) -> Value:
    return b.op("linear", rows(b, 19), weight("gate.w", 46, 19), activation="silu", gated=True, dtype=dtype)


def residual(b: GraphBuilder, dtype: str | None) -> Value:
    return b.op("linear", rows(b, 19), weight("res.w", 37, 19), None, rows(b, 37), dtype=dtype)


def odd_numbers(b: GraphBuilder, dtype: str | None) -> Value:
    """What a linear of zeros leaves of its residual."""
    w = weight("zero.w", len(ODD), 19)
    return b.op("linear", rows(b, 19), w, None, embedded(b, "odd", len(ODD)), dtype=dtype)


CASES: tuple[Case, ...] = (rms, layer, linear, gated, residual, odd_numbers)


@pytest.fixture(scope="module", params=levels())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Each case twice: as f32, then as bf16 widened again."""
    b, states = paged_builder(STATE)
    results = [part for case in CASES for part in (case(b, None), case(b, "bf16"))]
    results += attention(b, states[0])
    rows = [b.op("reshape", widened(b, r), shape=(T, width(r))) for r in results]
    graph = b.graph([b.op("concat", *rows, axis=1)])
    weights = random_weights(graph, np.random.default_rng(0))
    weights["odd"], weights["zero.w"] = np.tile(ODD, (VOCAB, 1)), np.zeros((len(ODD), 19), np.float32)
    return Model(graph, weights, tmp_path_factory.mktemp("bf16"), request.param)


def attention(b: GraphBuilder, state: Value) -> list[Value]:
    q, k, v = (
        b.op("reshape", embedded(b, name, h * d), shape=(T, h, d))
        for name, h, d in (("q", 6, 16), ("k", 2, 16), ("v", 2, 20))
    )
    written = b.op("kv_write", state, k, v, arg(b, "slots0"), layer=0)
    operands = (q, written, arg(b, "table0"), arg(b, "lens"), arg(b, "starts"))
    return [
        b.op("paged_attention", *operands, layer=0, scale=0.3, mask=CAUSAL, dtype=dtype)
        for dtype in (None, "bf16")
    ]


def widened(b: GraphBuilder, value: Value) -> Value:
    return b.op("cast", value, dtype="f32") if tensor_of(value).dtype is DType.BF16 else value


def width(value: Value) -> int:
    return int(np.prod([int(d) for d in tensor_of(value).shape[1:]]))


def run(model: Model, ids: list[int]) -> list[Array]:
    """The cases' results, f32 and bf16 in turn."""
    engine = model.open(2)
    out = model.step(engine, model.cache(8), [Chunk(list(range(8)), 0, ids)])
    model.library.octavo_close(engine)
    concat = model.graph.producers()[model.graph.outputs[0].name]
    widths = [int(tensor_of(a).shape[1]) for a in concat.args]
    return np.split(out, np.cumsum(widths)[:-1], axis=1)


@pytest.mark.parametrize("count", [1, 2, 33, 90])
def test_the_result_is_rounded_to_the_nearest_even_bf16(model: Model, count: int) -> None:
    found = run(model, [(i * 7 + 3) % VOCAB for i in range(count)])
    assert len(found) == 2 * (len(CASES) + 1)
    for wide, narrow in zip(found[0::2], found[1::2], strict=True):
        rounded = wide.astype(DType.BF16.numpy).astype(np.float32)
        np.testing.assert_array_equal(narrow, rounded)
        assert (rounded != wide).any()


def test_nan_stays_nan(model: Model) -> None:
    """An id outside the table is a row of NaN."""
    found = run(model, [1, VOCAB + 3, 2])[: 2 * len(CASES)]
    for wide, narrow in zip(found[0::2], found[1::2], strict=True):
        assert np.isnan(wide[1]).all()
        np.testing.assert_array_equal(narrow, wide.astype(DType.BF16.numpy).astype(np.float32))
