"""moe_linear against float64, with every epilogue, and its bits whatever rows are beside a row."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from codegen import cpp
from codegen.cpp import CodegenError
from ir.dims import symbol
from ir.graph import Graph, Value
from ir.types import DType
from tests.codegen.experts import VOCAB, Array, chosen, draw_experts, per_slot, source
from tests.codegen.harness import Chunk, Model, aligned, levels, lower, paged_builder, pointer, weight


@dataclass(frozen=True)
class Case:
    """n: rows of an expert's matrix. slots: whether each slot has a row of its own."""

    k: int
    n: int
    experts: int
    top: int
    dtype: DType = DType.F32
    bias: bool = False
    activation: str = "none"
    gated: bool = False
    slots: bool = False
    choice: str = "any"

    @property
    def width(self) -> int:
        return self.n // 2 if self.gated else self.n


CASES = {
    "plain": Case(48, 32, 8, 2),
    "odd": Case(37, 41, 5, 3, bias=True),
    "one_expert": Case(29, 17, 1, 1, bias=True, activation="relu"),
    "all_experts": Case(31, 20, 4, 4, slots=True),
    "top_one": Case(17, 15, 7, 1, activation="silu"),
    "same": Case(300, 33, 6, 2, choice="same", slots=True),
    "few": Case(64, 16, 40, 3, choice="few"),
    "many": Case(16, 19, 100, 8),
    "gated": Case(48, 2 * 56, 8, 2, activation="silu", gated=True),
    "gated_odd": Case(29, 2 * 23, 3, 2, bias=True, activation="gelu_tanh", gated=True, slots=True),
    "bf16": Case(48, 65, 8, 2, DType.BF16, bias=True),
    "bf16_gated": Case(20, 2 * 40, 6, 2, DType.BF16, activation="silu", gated=True),
    "bf16_odd": Case(37, 41, 5, 3, DType.BF16, bias=True, slots=True),
    "bf16_odd_gated": Case(19, 2 * 9, 4, 4, DType.BF16, bias=True, gated=True, activation="silu"),
    "bf16_same": Case(514, 18, 6, 2, DType.BF16, choice="same"),
    "f16": Case(33, 24, 4, 2, DType.F16, bias=True),
}


def graph(cases: dict[str, Case]) -> Graph:
    b, _ = paged_builder()
    results: list[Value] = []
    for name, c in cases.items():
        shape = (c.top, c.k) if c.slots else (c.k,)
        x = source(b, name, *shape, dtype="bf16" if c.dtype is DType.BF16 else "f32")
        w = weight(f"{name}.w", c.experts * c.n, c.k, dtype=c.dtype)
        bias = weight(f"{name}.b", c.experts, c.n) if c.bias else None
        options = {"activation": c.activation, "gated": c.gated, "dtype": "f32", "num_experts": c.experts}
        y = b.op("moe_linear", x, w, chosen(b, name, c.top), bias, loc=name, **options)
        results.append(b.op("reshape", y, shape=(symbol("T"), c.top * c.width)))
    return b.graph([b.op("concat", *results, axis=1)])


def draw(name: str, c: Case, rng: np.random.Generator) -> dict[str, Array]:
    rows = c.k * (c.top if c.slots else 1)
    numbers = {"x": (VOCAB, rows), "w": (c.experts * c.n, c.k), "b": (c.experts, c.n)}
    found = {n: rng.standard_normal(shape).astype(np.float32) for n, shape in numbers.items()}
    found["w"] = (found["w"] * 0.3).astype(c.dtype.numpy)
    found["experts"] = draw_experts(c.experts, c.top, c.choice, rng)
    return {f"{name}.{n}": a for n, a in found.items()}


def activate(x: Array, kind: str) -> Array:
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x


def expected(name: str, c: Case, weights: dict[str, Array], tokens: list[int]) -> Array:
    x = weights[f"{name}.x"][tokens]
    x = (x.astype(DType.BF16.numpy) if c.dtype is DType.BF16 else x).astype(np.float64)
    matrices = weights[f"{name}.w"].astype(np.float64).reshape(c.experts, c.n, c.k)

    def linear(expert: int, rows: Array) -> Array:
        y = rows @ matrices[expert].T + (weights[f"{name}.b"][expert] if c.bias else 0)
        if c.gated:
            return activate(y[:, : c.width], c.activation) * y[:, c.width :]
        return activate(y, c.activation)

    rows = x.reshape(len(tokens), c.top, c.k) if c.slots else x
    return per_slot(weights[f"{name}.experts"][tokens], rows, c.width, linear).reshape(len(tokens), -1)


@pytest.fixture(scope="module", params=levels())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    rng = np.random.default_rng()
    weights = {key: a for name, c in CASES.items() for key, a in draw(name, c, rng).items()}
    return Model(graph(CASES), weights, tmp_path_factory.mktemp("moe"), request.param)


def spans() -> Iterator[tuple[str, Case, slice]]:
    """The columns of the result that are each case's."""
    start = 0
    for name, c in CASES.items():
        yield name, c, slice(start, start + c.top * c.width)
        start += c.top * c.width


def ids(count: int) -> list[int]:
    return [(i * 7 + 3) % VOCAB for i in range(count)]


def run(model: Model, engine: int, tokens: list[int]) -> Array:
    return model.step(engine, [], [Chunk(list(range(64)), 0, tokens)])


def forward(model: Model, tokens: list[int], threads: int = 2) -> Array:
    engine = model.open(threads)
    out = run(model, engine, tokens)
    model.library.octavo_close(engine)
    return out


@pytest.mark.parametrize("count", [1, 2, 3, 5, 15, 16, 17, 31, 150])
def test_close_to_float64(model: Model, count: int) -> None:
    tokens = ids(count)
    got = forward(model, tokens)
    for name, c, columns in spans():
        want = expected(name, c, model.weights, tokens)
        error = np.abs(got[:, columns] - want).max() / want.std()
        assert error < 1e-5, (name, error)


def test_a_row_has_the_same_bits_alone_in_batches_and_on_any_number_of_threads(model: Model) -> None:
    tokens = ids(150)
    together = forward(model, tokens, threads=1)
    for threads in (2, 3):
        assert np.array_equal(forward(model, tokens, threads), together)
    engine = model.open(2)
    parts = [(0, 1), (5, 1), (149, 1), (3, 2), (8, 6), (4, 9), (40, 11), (1, 15), (20, 16), (33, 31), (0, 97)]
    for start, size in parts:
        part = run(model, engine, tokens[start : start + size])
        assert np.array_equal(part, together[start : start + size]), (start, size)
    model.library.octavo_close(engine)


@pytest.mark.parametrize("count", [1, 20])
def test_a_slot_whose_expert_is_none_is_not_a_number_and_spoils_no_other(model: Model, count: int) -> None:
    tokens = ids(count)
    plain = forward(model, tokens)
    order = list(model.generated.weight_order)
    arrays = {n: aligned(model.packed[n].size, np.uint8, model.packed[n]) for n in order}
    for name, c, _ in spans():
        arrays[f"{name}.experts.plain"].view(np.int32).reshape(VOCAB, c.top)[tokens[-1], 0] = (
            c.experts if count == 1 else -1
        )
    engine = model.open(2)
    spoilt = (ctypes.c_void_p * len(order))(*(pointer(arrays[n]) for n in order))
    model.library.octavo_set_weights(ctypes.c_void_p(engine), spoilt)
    got = run(model, engine, tokens)
    model.library.octavo_close(engine)
    assert np.array_equal(got[:-1], plain[:-1])
    for _, c, columns in spans():
        slots, before = (a[-1, columns].reshape(c.top, c.width) for a in (got, plain))
        assert np.isnan(slots[0]).all() and np.array_equal(slots[1:], before[1:])


def test_more_experts_than_a_kernel_counts_are_refused_by_name() -> None:
    with pytest.raises(CodegenError, match="1025 experts; there may be 1024") as caught:
        cpp.generate(lower(graph({"vast": Case(3, 2, 1025, 1)})))
    assert caught.value.op is not None and caught.value.op.loc == "vast"


@pytest.mark.parametrize("dtype", ["i32", "i64"])
def test_every_token_may_be_given_all_experts(tmp_path: Path, dtype: str) -> None:
    """As a product with all experts' matrices is written."""
    b, _ = paged_builder()
    every = b.op("expand", b.op("iota", size=3, dtype=dtype), shape=(symbol("T"), 3))
    y = b.op("moe_linear", source(b, "x", 20), weight("w", 3 * 17, 20), every, num_experts=3)
    built = Model(b.graph([b.op("reshape", y, shape=(symbol("T"), 3 * 17))]), None, tmp_path)
    want = built.weights["x.x"][ids(9)].astype(np.float64) @ built.weights["w"].astype(np.float64).T
    assert np.abs(forward(built, ids(9)) - want).max() < 1e-5


@pytest.mark.parametrize("name", ["odd", "gated_odd", "f16"])
def test_panels_hold_each_expert_padded_with_zeros(model: Model, name: str) -> None:
    c, halves = CASES[name], 1 + CASES[name].gated
    layout = "paired" if c.gated else "panels"
    packed = {w.name: w for w in model.generated.weights}[f"{name}.w.{layout}"]
    panels = -(-c.width // 16)
    assert packed.packed_shape == (c.experts * panels * halves, c.k, 16)
    raw = np.array(model.packed[packed.name]).view(np.float32).reshape(c.experts, panels, halves, c.k, 16)
    rows = raw.transpose(0, 2, 1, 4, 3).reshape(c.experts, halves, panels * 16, c.k)
    want = model.weights[f"{name}.w"].reshape(c.experts, halves, c.width, c.k)
    assert np.array_equal(rows[:, :, : c.width], want) and not rows[:, :, c.width :].any()
