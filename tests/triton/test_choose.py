"""topk and take_along under Triton's interpreter, against numpy's sort, and their binaries."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from codegen.cache import Cache
from codegen.triton import CodegenError, find_device, generate
from codegen.triton.build import build_kernels
from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Value
from tests.codegen.harness import Array, Chunk, arg, lower, paged_builder, weight
from tests.triton.harness import TritonModel

VOCAB = 24
T = symbol("T")
WIDTHS = {"f32": (17, 3), "bf16": (64, 8), "f16": (1, 1), "i32": (5, 5), "i64": (37, 2)}  # a row, the largest


def rows(b: GraphBuilder, name: str, *shape: int, dtype: str = "f32") -> Value:
    x = b.op("embed", arg(b, "ids"), weight(name, VOCAB, int(np.prod(shape))))
    x = x if dtype == "f32" else b.op("cast", x, dtype=dtype)
    return x if len(shape) == 1 else b.op("reshape", x, shape=(T, *shape))


def flat(b: GraphBuilder, x: Value, width: int, dtype: str = "f32") -> Value:
    wide = x if dtype == "f32" else b.op("cast", x, dtype="f32")
    return b.op("reshape", wide, shape=(T, width))


def table(rng: np.random.Generator, width: int, dtype: str) -> Array:
    """Small whole numbers, so that many are equal, and of floats each that is special."""
    found = rng.integers(-4, 5, (VOCAB, width)).astype(np.float32)
    if dtype[0] == "i":
        return found
    found[rng.random(found.shape) < 0.1] = np.nan
    found[rng.random(found.shape) < 0.1] = np.inf
    found[rng.random(found.shape) < 0.2] = -np.inf
    found[rng.random(found.shape) < 0.1] = -0.0
    found[3] = np.nan
    found[4] = -np.inf
    return found


def order(x: Array) -> Array:
    """Indices of a row's elements: NaN first, then falling, equal ones as they stand."""
    return np.asarray(
        [
            sorted(range(len(row)), key=lambda i: (0, 0.0) if np.isnan(row[i]) else (1, -row[i]))
            for row in x.astype(np.float64)
        ]
    )


def step(graph: Graph, weights: dict[str, Array], directory: Path, tokens: list[int]) -> Array:
    return TritonModel(graph, weights, directory).step([], [Chunk(list(range(4)), 0, tokens)])


@pytest.mark.parametrize("dtype", WIDTHS)
def test_the_largest_of_a_row_in_order(dtype: str, tmp_path: Path) -> None:
    width, k = WIDTHS[dtype]
    b, _ = paged_builder()
    values, indices = b.op("topk", rows(b, "x", width, dtype=dtype), k=k, several=True)
    graph = b.graph([b.op("concat", flat(b, values, k, dtype), flat(b, indices, k, "i32"), axis=1)])
    x = table(np.random.default_rng(width), width, dtype)
    tokens = [i % VOCAB for i in range(VOCAB + 5)]
    got = step(graph, {"x": x}, tmp_path, tokens)
    want = order(x)[tokens, :k]
    np.testing.assert_array_equal(got[:, k:], want)
    np.testing.assert_array_equal(got[:, :k], np.take_along_axis(x[tokens], want, 1))


def test_a_tokens_rows_are_chosen_from_one_by_one(tmp_path: Path) -> None:
    """Of groups of a part of each row, and the sum of each group's."""
    b, _ = paged_builder()
    part = b.op("slice", rows(b, "x", 23), axis=1, start=2, stop=20)
    values, indices = b.op("topk", b.op("reshape", part, shape=(T, 3, 6)), k=2, several=True)
    sums = b.op("sum", values, axes=(2,), keepdims=False)
    graph = b.graph([b.op("concat", sums, flat(b, indices, 6, "i32"), axis=1)])
    x = np.random.default_rng(1).standard_normal((VOCAB, 23)).astype(np.float32)
    tokens = [7, 0, 23, 7, 11]
    got = step(graph, {"x": x}, tmp_path, tokens)
    groups = x[tokens][:, 2:20].reshape(-1, 3, 6)
    want = np.argsort(-groups, axis=2)[:, :, :2]
    np.testing.assert_array_equal(got[:, 3:], want.reshape(-1, 6))
    best = np.take_along_axis(groups, want, 2).astype(np.float64).sum(2)
    np.testing.assert_allclose(got[:, :3], best, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "i64"])
def test_elements_are_taken_along_a_row(dtype: str, tmp_path: Path) -> None:
    """One outside of it is NaN, 0 among integers."""
    b, _ = paged_builder()
    cut = b.op("slice", rows(b, "x", 2 * 13 + 3, dtype=dtype), axis=1, start=1, stop=27)
    x = b.op("reshape", cut, shape=(T, 2, 13))
    indices = rows(b, "i", 2, 5, dtype="i32")
    graph = b.graph([flat(b, b.op("take_along", x, indices), 10, dtype)])
    rng = np.random.default_rng(2)
    weights = {"x": rng.integers(-90, 90, (VOCAB, 29)).astype(np.float32)}
    weights["i"] = rng.integers(0, 13, (VOCAB, 10)).astype(np.float32)
    weights["i"][5, :3] = (-1, 13, 1 << 20)
    tokens = [5, 0, 23, 5, 11]
    got = step(graph, weights, tmp_path, tokens).reshape(-1, 2, 5)
    at = weights["i"][tokens].astype(np.int64).reshape(-1, 2, 5)
    want = np.take_along_axis(weights["x"][tokens][:, 1:27].reshape(-1, 2, 13), at.clip(0, 12), 2)
    want = np.where((at >= 0) & (at < 13), want, 0 if dtype == "i64" else np.nan)
    np.testing.assert_array_equal(got, want)


def largest(width: int, dtype: str = "f32") -> Graph:
    b, _ = paged_builder()
    values, indices = b.op("topk", rows(b, "x", width, dtype=dtype), k=8, several=True, loc="layers.3.router")
    taken = b.op("take_along", rows(b, "y", width), indices)
    return b.graph([b.op("concat", flat(b, values, 8, dtype), taken, axis=1)])


@pytest.mark.parametrize("target", ["cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "hip:gfx942"])
@pytest.mark.parametrize("width", [8, 256])
def test_kernels_compile_and_fit_registers(target: str, width: int, tmp_path: Path) -> None:
    generated = generate(lower(largest(width, "bf16"), "gpu"), find_device(target))
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/kernels.py").write_text(generated.source)
    kernels = [k for k in generated.kernels if k.function in ("topk", "take_along")]
    built = build_kernels(tmp_path, kernels, generated.device, cache=Cache(tmp_path / "cache"))
    assert {k.kernel.function: k.spills for k in built} == {"topk": 0, "take_along": 0}


def test_a_row_that_a_program_cannot_hold_is_refused_with_its_place() -> None:
    with pytest.raises(CodegenError, match=r"layers\.3\.router: no Triton kernel for topk: rows of 20000"):
        generate(lower(largest(20000), "gpu"), find_device("cuda:sm_90"))
