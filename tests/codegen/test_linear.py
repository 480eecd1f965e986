"""linear against float64, with every epilogue, and its bits whatever rows are beside a row."""

from __future__ import annotations

import numpy as np
import pytest

from ir.graph import Graph, Value
from ir.types import DType
from tests.codegen.harness import (
    Chunk,
    Model,
    arg,
    levels,
    paged_builder,
    reference_step,
    weight,
)

VOCAB = 64
CASES = {
    # name: (K, N, dtype, bias, residual, activation, gated)
    "plain": (48, 32, DType.F32, False, False, "none", False),
    "odd": (37, 41, DType.F32, True, False, "none", False),
    "prime_residual": (31, 101, DType.F32, True, True, "relu", False),
    "narrow": (3, 5, DType.F32, False, True, "gelu", False),
    "wide": (257, 300, DType.F32, True, False, "gelu_tanh", False),
    "gated": (48, 2 * 56, DType.F32, False, False, "silu", True),
    "gated_odd": (29, 2 * 23, DType.F32, True, True, "gelu_tanh", True),
    "bf16": (48, 65, DType.BF16, True, False, "tanh", False),
    "bf16_gated": (19, 2 * 40, DType.BF16, False, False, "sigmoid", True),
    "bf16_odd": (37, 41, DType.BF16, True, True, "none", False),
    "bf16_one": (1, 16, DType.BF16, False, False, "none", False),
    "bf16_wide": (515, 130, DType.BF16, False, True, "silu", False),
}


def graph() -> Graph:
    b, _ = paged_builder()
    results: list[Value] = []
    for name, (k, n, dtype, bias, residual, activation, gated) in CASES.items():
        out = n // 2 if gated else n
        x = b.op("embed", arg(b, "ids"), weight(f"{name}.x", VOCAB, k))
        x = b.op("cast", x, dtype="bf16") if dtype is DType.BF16 else x
        r = b.op("embed", arg(b, "ids"), weight(f"{name}.r", VOCAB, out)) if residual else None
        bias_arg = weight(f"{name}.b", n) if bias else None
        w = weight(f"{name}.w", n, k, dtype=dtype)
        options = {"activation": activation, "gated": gated, "dtype": "f32"}
        results.append(b.op("linear", x, w, bias_arg, r, loc=name, **options))
    return b.graph([b.op("concat", *results, axis=1)])


@pytest.fixture(scope="module", params=levels())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(graph(), None, tmp_path_factory.mktemp("linear"), request.param)


def ids(count: int) -> list[int]:
    return [(i * 7 + 3) % VOCAB for i in range(count)]


def forward(model: Model, tokens: list[int], threads: int = 2) -> np.ndarray:
    engine = model.open(threads)
    out = run(model, engine, tokens)
    model.library.octavo_close(engine)
    return out


def run(model: Model, engine: int, tokens: list[int]) -> np.ndarray:
    return model.step(engine, [], [Chunk(list(range(64)), 0, tokens)])


@pytest.mark.parametrize("count", [1, 2, 5, 15, 16, 17, 31, 70])
def test_close_to_float64(model: Model, count: int) -> None:
    tokens = ids(count)
    want, _ = reference_step(model.graph, model.weights, [], [Chunk(list(range(64)), 0, tokens)])
    got = forward(model, tokens)
    start = 0
    for name, (_, n, _, _, _, _, gated) in CASES.items():
        width = n // 2 if gated else n
        part = slice(start, start + width)
        error = np.abs(got[:, part] - want[:, part]).max() / want[:, part].std()
        assert error < 1e-5, name
        start += width


def test_a_row_has_the_same_bits_alone_in_batches_and_on_any_number_of_threads(model: Model) -> None:
    tokens = ids(70)
    together = forward(model, tokens, threads=1)
    for threads in (2, 3):
        assert np.array_equal(forward(model, tokens, threads), together)
    engine = model.open(2)
    for start, size in [
        (0, 1),
        (5, 1),
        (69, 1),
        (3, 2),
        (8, 6),
        (4, 9),
        (40, 11),
        (0, 14),
        (1, 15),
        (20, 16),
        (33, 31),
    ]:
        part = run(model, engine, tokens[start : start + size])
        assert np.array_equal(part, together[start : start + size]), (start, size)
    model.library.octavo_close(engine)


def test_panels_hold_the_weight_padded_with_zeros(model: Model) -> None:
    names = {w.name: w for w in model.generated.weights}
    packed = names["odd.w.panels"]
    raw = np.array(model.packed["odd.w.panels"]).view(np.float32).reshape(packed.packed_shape)
    rows = raw.transpose(0, 2, 1).reshape(-1, 37)
    assert np.array_equal(rows[:41], model.weights["odd.w"]) and not rows[41:].any()


def test_panels_of_bf16_hold_pairs_along_k(model: Model) -> None:
    packed = {w.name: w for w in model.generated.weights}["bf16_odd.w.panels"]
    assert packed.packed_shape == (3, 19, 16, 2)
    raw = np.array(model.packed[packed.name]).view(DType.BF16.numpy).reshape(packed.packed_shape)
    rows = raw.transpose(0, 2, 1, 3).reshape(-1, 38)
    assert np.array_equal(rows[:41, :37], model.weights["bf16_odd.w"])
    assert not rows[41:].any() and not rows[:, 37:].any()
