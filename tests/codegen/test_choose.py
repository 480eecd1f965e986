"""topk and take_along against numpy: ties, NaN, every element type, groups within a token, odd sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.dims import symbol
from ir.graph import Graph, Value
from ir.types import DType
from tests.codegen.experts import VOCAB, source
from tests.codegen.harness import Chunk, Model, arg, levels, paged_builder, weight

Array = np.ndarray[Any, np.dtype[Any]]
T = symbol("T")
CASES = {
    # name: (groups of a token, elements, k, type)
    "some": (1, 64, 8, "f32"),
    "odd": (1, 17, 5, "f32"),
    "one": (1, 31, 1, "f32"),
    "all": (1, 13, 13, "f32"),
    "single": (1, 1, 1, "f32"),
    "many": (1, 512, 10, "f32"),
    "groups": (4, 7, 2, "f32"),
    "bf16": (1, 40, 6, "bf16"),
    "i32": (1, 23, 4, "i32"),
    "i64": (2, 9, 3, "i64"),
}


def graph() -> Graph:
    b, _ = paged_builder()
    results: list[Value] = []
    for name, (groups, size, k, dtype) in CASES.items():
        shape, flat = ((groups,) if groups > 1 else ()), (T, groups * k)
        x, other = (source(b, f"{name}.{n}", *shape, size, dtype=dtype) for n in ("a", "b"))
        values, indices = b.op("topk", x, k=k, several=True)
        along = b.op("take_along", other, indices)
        results += [
            b.op("cast", b.op("reshape", y, shape=flat), dtype="f32") for y in (values, indices, along)
        ]
    table = weight("any", VOCAB, 3, dtype=DType.I32)
    stray = b.op("take", table, arg(b, "ids"), axis=0)
    for dtype in ("f32", "bf16", "i32"):
        taken = b.op("take_along", source(b, f"stray.{dtype}", 5, dtype=dtype), stray)
        results.append(b.op("cast", taken, dtype="f32"))
    return b.graph([b.op("concat", *results, axis=1)])


def draw(rng: np.random.Generator) -> dict[str, Array]:
    """Numbers of which many are equal; both zeros; rows with NaN and infinities."""
    found: dict[str, Array] = {}
    for name, (groups, size, _, dtype) in CASES.items():
        x = rng.integers(-6, 6, (VOCAB, groups * size)).astype(np.float32)
        x[1], x[2] = np.arange(groups * size), 7
        x[3] = np.where(rng.random(groups * size) < 0.5, -0.0, 0.0)
        if dtype in ("f32", "bf16"):
            x[12:20] = rng.standard_normal((8, groups * size))
            x[4:12][rng.random((8, groups * size)) < 0.3] = np.nan
            x[4:12][rng.random((8, groups * size)) < 0.2] = np.inf
            x[4:12][rng.random((8, groups * size)) < 0.2] = -np.inf
        found[f"{name}.a.x"] = x
        found[f"{name}.b.x"] = rng.integers(-99, 99, x.shape).astype(np.float32)
    for dtype in ("f32", "bf16", "i32"):
        found[f"stray.{dtype}.x"] = rng.integers(1, 99, (VOCAB, 5)).astype(np.float32)
    found["any"] = rng.integers(-2, 8, (VOCAB, 3)).astype(np.int32)
    found["any"][:2] = [[-(2**31), 2**31 - 1, 5], [-1, 0, 4]]
    return found


@pytest.fixture(scope="module", params=levels())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    weights = draw(np.random.default_rng())
    return Model(graph(), weights, tmp_path_factory.mktemp("choose"), request.param)


def forward(model: Model, tokens: list[int], threads: int) -> Array:
    engine = model.open(threads)
    out = model.step(engine, [], [Chunk(list(range(64)), 0, tokens)])
    model.library.octavo_close(engine)
    return out


def stored(weights: dict[str, Array], name: str, tokens: list[int], dtype: str) -> Array:
    x = weights[name][tokens]
    return x.astype(DType.BF16.numpy).astype(np.float32) if dtype == "bf16" else x


def largest(row: Array, k: int) -> list[int]:
    """NaN first, then falling; of equal ones the first."""
    return sorted(range(len(row)), key=lambda i: (0, 0, i) if np.isnan(row[i]) else (1, -row[i], i))[:k]


@pytest.mark.parametrize(("count", "threads"), [(1, 1), (1, 3), (15, 2), (VOCAB, 3)])
def test_as_numpy_has_it(model: Model, count: int, threads: int) -> None:
    tokens = list(np.random.default_rng().permutation(VOCAB)[:count])
    got, start = forward(model, tokens, threads), 0
    for name, (groups, size, k, dtype) in CASES.items():
        rows = stored(model.weights, f"{name}.a.x", tokens, dtype).reshape(-1, size)
        other = stored(model.weights, f"{name}.b.x", tokens, dtype).reshape(-1, size)
        at = np.array([largest(row, k) for row in rows])
        for want in (np.take_along_axis(rows, at, 1), at, np.take_along_axis(other, at, 1)):
            part = got[:, start : start + groups * k]
            assert np.array_equal(part, want.reshape(count, -1), equal_nan=True), name
            start += groups * k
    indices = model.weights["any"][tokens].astype(np.int64)
    inside = (indices >= 0) & (indices < 5)
    for dtype in ("f32", "bf16", "i32"):
        taken = np.take_along_axis(model.weights[f"stray.{dtype}.x"][tokens], indices.clip(0, 4), 1)
        want = np.where(inside, taken, 0 if dtype == "i32" else np.nan)
        assert np.array_equal(got[:, start : start + 3], want, equal_nan=True), dtype
        start += 3
    assert start == got.shape[1]
