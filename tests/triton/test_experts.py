"""Linears of several experts under Triton's interpreter, against sums of each pair written out in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.triton import CodegenError, find_device, generate
from codegen.triton.tiles import LinearTile
from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Value
from ir.ops.pointwise import ACTIVATIONS
from ir.types import DType
from tests.codegen.harness import Array, Chunk, arg, lower, paged_builder, weight
from tests.triton import test_qlinear as quantized
from tests.triton.harness import TritonModel

VOCAB = 64
F32_ERROR = 2e-5
BF16_ERROR = 2.0**-8
BF16, F16, F32, I8, U4 = DType.BF16, DType.F16, DType.F32, DType.I8, DType.U4
T = symbol("T")


@dataclass(frozen=True)
class Case:
    """each: whether every slot of a token has a row of its own. before: elements of x's rows that are not the
    linear's. codes: how the matrices are quantised; the rest of it is not read.
    """

    experts: int
    slots: int
    n: int
    k: int
    x: DType = F32
    w: DType = F32
    out: DType = F32
    bias: bool = False
    gated: bool = False
    activation: str = "none"
    each: bool = False
    before: int = 0
    codes: quantized.Case | None = None

    @property
    def rows(self) -> int:
        """Of an expert's matrix."""
        return self.n * (1 + self.gated)

    @property
    def stacked(self) -> quantized.Case:
        assert self.codes is not None
        return replace(self.codes, n=self.experts * self.rows, k=self.k)


def quantised(q: DType, group: int, zero: int | DType = 0, **options: Any) -> quantized.Case:
    return quantized.Case(0, 0, q, group, zero, **options)


CASES = {
    "plain": Case(4, 2, 32, 48),
    "odd": Case(5, 3, 37, 41, bias=True, activation="gelu"),
    "gated": Case(8, 2, 23, 31, bias=True, gated=True, activation="silu"),
    "rows of their own": Case(7, 2, 19, 33, each=True),
    "a view": Case(6, 2, 16, 24, before=3),
    "one of one": Case(1, 1, 17, 15),
    "all of them": Case(3, 3, 9, 16, each=True, bias=True),
    "bf16": Case(4, 2, 33, 48, x=BF16, w=BF16, out=BF16, gated=True, activation="silu"),
    "f16": Case(4, 2, 33, 48, x=F32, w=F16, out=F32),
    "u4": Case(4, 2, 48, 128, codes=quantised(U4, 32, 8), gated=True, activation="silu"),
    "u4 zeros": Case(5, 2, 17, 96, codes=quantised(U4, 32, DType.U8), each=True, bias=True, x=BF16),
    "i8 of a row": Case(3, 2, 31, 101, codes=quantised(I8, 0), bias=True),
    "u8 offset": Case(3, 2, 20, 70, codes=quantised(DType.U8, 16, 32, offset=True)),
    "f8": Case(3, 1, 19, 130, codes=quantised(DType.F8E4M3, 0)),
    "i8 by u4": Case(4, 2, 24, 97, codes=quantised(U4, 32, 8, x_dtype=I8), gated=True, activation="silu"),
    "i8 by u4 each": Case(4, 2, 24, 97, codes=quantised(U4, 64, U4, x_dtype=I8), each=True),
    "f8 rows by f8": Case(4, 2, 24, 64, codes=quantised(DType.F8E4M3, 0, x_dtype=DType.F8E4M3, x_group=0)),
}  # fmt: skip


def add(b: GraphBuilder, name: str, c: Case) -> Value:
    """The linear's result [T, slots * n] in f32."""

    def embedded(suffix: str, size: int, dtype: DType, shape: tuple[int, ...] = ()) -> Value:
        row = b.op("embed", arg(b, "ids"), weight(f"{name}.{suffix}", VOCAB, size))
        row = row if dtype is F32 else b.op("cast", row, dtype=str(dtype))
        return b.op("reshape", row, shape=(T, *shape)) if shape else row

    x = embedded("x", (c.slots if c.each else 1) * c.k + c.before, c.x)
    x = b.op("slice", x, axis=1, start=c.before, stop=c.before + c.k) if c.before else x
    x = b.op("reshape", x, shape=(T, c.slots, c.k)) if c.each else x
    experts = embedded("e", c.slots, DType.I32)
    bias = weight(f"{name}.b", c.experts, c.rows) if c.bias else None
    ends = {"activation": c.activation, "gated": c.gated, "dtype": str(c.out), "num_experts": c.experts}
    if c.codes is None:
        w = weight(f"{name}.w", c.experts * c.rows, c.k, dtype=c.w)
        out = b.op("moe_linear", x, w, experts, bias, **ends)
    else:
        q, grouped = c.stacked, (c.stacked.rows, c.stacked.groups)
        zeros = weight(f"{name}.z", *grouped, dtype=q.zero) if isinstance(q.zero, DType) else None
        out = b.op(
            "qmoe_linear", x, weight(f"{name}.q", q.rows, q.k, dtype=q.q),
            weight(f"{name}.s", *grouped, dtype=q.scale), experts, zeros,
            weight(f"{name}.o", *grouped, dtype=q.scale) if q.offset else None, bias,
            group_size=q.group, zero=0 if isinstance(q.zero, DType) else q.zero,
            x_dtype=q.x_dtype and str(q.x_dtype), x_group_size=q.x_group, **ends,
        )  # fmt: skip
    out = out if c.out is F32 else b.op("cast", out, dtype="f32")
    return b.op("reshape", out, shape=(T, c.slots * c.n))


def graph(cases: Mapping[str, Case]) -> Graph:
    b, _ = paged_builder()
    outs = [add(b, name, c) for name, c in cases.items()]
    return b.graph([b.op("concat", *outs, axis=1) if len(outs) > 1 else outs[0]])


def matrices(name: str, c: Case, seed: int) -> dict[str, Array]:
    """Each token's experts are chosen at random, without two that are equal; token 0's like token 1's."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    arrays = {} if c.codes is None else quantized.matrices(name, c.stacked, seed)
    if c.codes is None:
        arrays[f"{name}.w"] = (normal(c.experts * c.rows, c.k) * 0.3).astype(c.w.numpy)
    arrays[f"{name}.x"] = normal(VOCAB, (c.slots if c.each else 1) * c.k + c.before)
    arrays[f"{name}.b"] = normal(c.experts, c.rows)
    chosen = np.stack([rng.permutation(c.experts)[: c.slots] for _ in range(VOCAB)])
    chosen[0] = chosen[1]
    arrays[f"{name}.e"] = chosen.astype(np.float32)
    return arrays


def model(cases: Mapping[str, Case], directory: Path, **options: Any) -> TritonModel:
    weights: dict[str, Array] = {}
    for seed, (name, c) in enumerate(cases.items()):
        weights |= matrices(name, c, seed)
    return TritonModel(graph(cases), weights, directory, **options)


def run(of: TritonModel, tokens: list[int]) -> Array:
    return of.step([], [Chunk(list(range(64)), 0, tokens)])


def want(name: str, c: Case, given: Mapping[str, Array], tokens: list[int]) -> Array:
    """A pair at a time."""
    w = given[f"{name}.w"] if c.codes is None else quantized.floats(name, c.stacked, dict(given))
    w = w.astype(np.float64).reshape(c.experts, c.rows, c.k)
    rows = given[f"{name}.x"][tokens][:, c.before :].astype(c.x.numpy).astype(np.float64)
    found = np.zeros((len(tokens), c.slots, c.n))
    for t, token in enumerate(tokens):
        for slot, e in enumerate(given[f"{name}.e"][token].astype(int)):
            x = rows[t, slot * c.k : (slot + 1) * c.k] if c.each else rows[t]
            if c.codes is not None and c.codes.x_dtype is not None:
                x = quantized.rounded(x[None], c.codes.x_dtype, c.codes.x_group)[0]
            y = w[e] @ x + (given[f"{name}.b"][e].astype(np.float64) if c.bias else 0)
            activate = ACTIVATIONS[c.activation]
            found[t, slot] = activate(y[: c.n]) * y[c.n :] if c.gated else activate(y)
    return found.reshape(len(tokens), -1)


def check(cases: Mapping[str, Case], of: TritonModel, tokens: list[int]) -> None:
    got, start = run(of, tokens), 0
    for name, c in cases.items():
        part, start = got[:, start : start + c.slots * c.n], start + c.slots * c.n
        y = want(name, c, of.weights, tokens)
        error = F32_ERROR if c.out is F32 else BF16_ERROR
        np.testing.assert_allclose(part, y, rtol=error, atol=error * np.abs(y).max(), err_msg=name)


def ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(count).integers(0, VOCAB, count)]


@pytest.fixture(scope="module")
def every_case(tmp_path_factory: pytest.TempPathFactory) -> TritonModel:
    return model(CASES, tmp_path_factory.mktemp("experts"))


@pytest.mark.parametrize("count", [1, 2, 17, 67])
def test_every_case_is_close_to_float64(every_case: TritonModel, count: int) -> None:
    check(CASES, every_case, ids(count))


def test_experts_that_all_or_none_choose(every_case: TritonModel) -> None:
    """Whole tiles of one expert, and none of most."""
    check(CASES, every_case, [5] * 33 + [0, 1] * 16)


def test_lists_that_take_several_turns(tmp_path: Path) -> None:
    """Of 393 pairs; a program looks at 256 at a time."""
    cases = {"odd": CASES["odd"]}
    check(cases, model(cases, tmp_path), ids(131))


TILE = st.builds(
    LinearTile, m=st.sampled_from([1, 2, 16, 32]), n=st.sampled_from([16, 32]), k=st.sampled_from([16, 32]),
    num_warps=st.just(1), num_stages=st.just(1), parts=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 8]), clamped=st.booleans(),
)  # fmt: skip
ANY = st.builds(
    Case, experts=st.integers(3, 9), slots=st.integers(1, 3), n=st.integers(1, 40), k=st.integers(1, 40),
    bias=st.booleans(), gated=st.booleans(), each=st.booleans(), activation=st.sampled_from(["none", "relu"]),
)  # fmt: skip


@given(case=ANY, tile=TILE, count=st.integers(1, 40), seed=st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_any_tile_on_any_sizes_is_close_to_float64(
    case: Case, tile: LinearTile, count: int, seed: int
) -> None:
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr("codegen.triton.linear.linear_tiles", lambda *_, **__: [(None, tile)])
        of = model({"any": case}, Path(directory))
        few = np.random.default_rng(seed).integers(0, VOCAB, 3)  # whose experts the others choose too
        check({"any": case}, of, [int(i) for i in np.random.default_rng(seed).choice(few, count)])


@pytest.mark.parametrize("name", ["gated", "u4 zeros", "i8 by u4"])
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(name: str, tmp_path: Path) -> None:
    of, tokens = model({name: CASES[name]}, tmp_path, invariant=True), ids(7)
    together = run(of, tokens)
    kernels = {k.function for k in of.generated.kernels}
    assert "pair_lists" in kernels and any(function.endswith("direct") for function in kernels)
    for start, size in [(0, 1), (6, 1), (2, 3)]:
        assert np.array_equal(run(of, tokens[start : start + size]), together[start : start + size])


@pytest.mark.parametrize("count", [1, 30])
def test_experts_may_be_part_of_wider_rows(count: int, tmp_path: Path) -> None:
    """One that there is not is the nearest: nothing outside of the matrices is read."""
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight("x", VOCAB, 24))
    wide = b.op("cast", b.op("embed", arg(b, "ids"), weight("e", VOCAB, 5)), dtype="i64")
    experts = b.op("slice", wide, axis=1, start=1, stop=3)
    out = b.op("moe_linear", x, weight("w", 4 * 16, 24), experts, None, num_experts=4)
    of = TritonModel(b.graph([b.op("reshape", out, shape=(T, 32))]), None, tmp_path)
    rng = np.random.default_rng(3)
    of.weights["e"][:] = rng.integers(0, 4, (VOCAB, 5))
    of.weights["e"][7, 1:3] = (-1, 1 << 20)
    of.packed = [of.weights[w.name] for w in of.generated.weights]
    tokens = [7, *ids(count - 1)]
    w = of.weights["w"].astype(np.float64).reshape(4, 16, 24)
    chosen = w[of.weights["e"][tokens, 1:3].astype(int).clip(0, 3)]
    y = np.einsum("tjnk,tk->tjn", chosen, of.weights["x"][tokens].astype(np.float64))
    np.testing.assert_allclose(run(of, tokens), y.reshape(-1, 32), atol=F32_ERROR * np.abs(y).max())


def test_what_has_no_kernel_is_refused_by_name() -> None:
    case = Case(4, 2, 16, 32, codes=quantised(DType.U2, 32, 1))
    with pytest.raises(CodegenError, match=r"no Triton kernel for qmoe_linear: weights of type u2"):
        generate(lower(graph({"w": case}), "gpu"), find_device("cuda:sm_90"))
