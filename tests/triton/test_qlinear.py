"""Linears and tables of quantised weights under Triton's interpreter, against sums written out in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from codegen.triton import CodegenError, find_device, generate
from ir.build import GraphBuilder
from ir.graph import Graph, Value
from ir.ops.pointwise import ACTIVATIONS
from ir.types import DType
from tests.codegen.harness import Array, Chunk, arg, lower, paged_builder, weight
from tests.triton.harness import TritonModel

VOCAB = 64
F32_ERROR = 2e-5
BF16_ERROR = 2.0**-8
U4, I8, U8, F8 = DType.U4, DType.I8, DType.U8, DType.F8E4M3


@dataclass(frozen=True)
class Case:
    """zero: the one that all groups have, or the type of an array of them."""

    n: int
    k: int
    q: DType
    group: int
    zero: int | DType = 0
    offset: bool = False
    scale: DType = DType.F16
    x_dtype: DType | None = None
    x_group: int = 32
    x: DType = DType.F32
    out: DType = DType.F32
    bias: bool = False
    residual: bool = False
    gated: bool = False
    activation: str = "none"

    @property
    def rows(self) -> int:
        return self.n * (1 + self.gated)

    @property
    def groups(self) -> int:
        return -(-self.k // self.group) if self.group else 1


CASES = {
    # weights alone: every type of codes, groups that fit tiles and that do not, rows of odd sizes
    "u4": Case(48, 128, U4, 32, 8),
    "u4 zeros": Case(17, 96, U4, 32, U8, scale=DType.F32),
    "u4 of u4 zeros": Case(33, 127, U4, 64, U4, bias=True),
    "u4 offset": Case(40, 100, U4, 32, offset=True, gated=True, activation="silu"),
    "u4 bf16": Case(16, 64, U4, 16, 8, x=DType.BF16, out=DType.BF16, residual=True),
    "u4 wide groups": Case(23, 513, U4, 256, 8, scale=DType.BF16),
    "u4 groups of 24": Case(16, 77, U4, 24, 7),
    "i8 of a row": Case(31, 101, I8, 0, bias=True, residual=True, activation="gelu"),
    "i8 of a row, zeros": Case(31, 101, I8, 0, I8),
    "i8": Case(15, 1, I8, 32),
    "u8": Case(50, 250, U8, 16, 32, offset=True),
    "f8": Case(19, 130, F8, 0, scale=DType.F32, gated=True, activation="gelu_tanh"),
    "f8 in groups": Case(19, 130, F8, 128),
    # x quantised too
    "i8 by u4": Case(48, 128, U4, 32, 8, x_dtype=I8),
    "i8 by u4 zeros": Case(17, 97, U4, 64, U4, x_dtype=I8, residual=True),
    "i8 by u4 offset": Case(20, 160, U4, 128, 0, offset=True, x_dtype=I8, gated=True, activation="relu"),
    "i8 by u4 of a far zero": Case(20, 64, U4, 32, 200, x_dtype=I8),
    "i8 rows by i8 rows": Case(37, 299, I8, 0, x_dtype=I8, x_group=0, bias=True),
    "i8 by i8 rows": Case(16, 70, I8, 0, 3, x_dtype=I8),
    "i8 rows by i8": Case(16, 70, I8, 32, I8, x_dtype=I8, x_group=0),
    "i8 by u8": Case(33, 64, U8, 32, 128, x_dtype=I8),
    "i8 by u8 zeros": Case(33, 65, U8, 32, U8, x_dtype=I8),
    "i8 by u8 less": Case(33, 65, U8, 32, 32, offset=True, x_dtype=I8),
    "i8 by groups of 16": Case(21, 75, U4, 16, 8, x_dtype=I8),
    "f8 rows by f8 rows": Case(20, 140, F8, 0, x_dtype=F8, x_group=0, x=DType.BF16),
    "f8 by f8": Case(20, 140, F8, 128, x_dtype=F8, x_group=64, activation="silu"),
    "f8 by i8": Case(20, 140, I8, 0, x_dtype=F8, x_group=0),
}


def ids(count: int, seed: int = 0) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, count)]


def matrices(name: str, c: Case, seed: int) -> dict[str, Array]:
    """Random codes, as wide as they go, and what scales them."""
    rng = np.random.default_rng(seed)
    grouped = (c.rows, c.groups)
    low, high = {U4: (0, 16), U8: (0, 256), I8: (-127, 128), F8: (-127, 128)}[c.q]
    codes = rng.integers(low, high, (c.rows, c.k)).astype(np.int16)
    if c.q is F8:
        found = (rng.standard_normal((c.rows, c.k)) * 100).clip(-448, 448)
        found[rng.random(found.shape) < 0.1] *= 2.0**-14  # subnormals
    else:
        found = codes
    arrays = {f"{name}.q": found.astype(c.q.numpy)}
    arrays[f"{name}.s"] = (rng.uniform(0.5, 1.5, grouped) * 0.3 / (high - low)).astype(c.scale.numpy)
    if isinstance(c.zero, DType):
        least, most = {U4: (0, 16), U8: (0, 256), I8: (-128, 128)}[c.zero]
        arrays[f"{name}.z"] = rng.integers(least, min(most, high), grouped).astype(c.zero.numpy)
    if c.offset:
        arrays[f"{name}.o"] = rng.uniform(-0.2, 0.1, grouped).astype(c.scale.numpy)
    arrays[f"{name}.b"] = rng.standard_normal(c.rows).astype(np.float32)
    arrays[f"{name}.r"] = rng.standard_normal((VOCAB, c.n)).astype(np.float32)
    arrays[f"{name}.x"] = rng.standard_normal((VOCAB, c.k)).astype(np.float32)
    arrays[f"{name}.x"][3] = 0  # a token whose groups have no largest element
    return arrays


def add(b: GraphBuilder, name: str, c: Case) -> Value:
    def given(suffix: str, *shape: int, dtype: DType) -> Any:
        return weight(f"{name}.{suffix}", *shape, dtype=dtype)

    def embedded(suffix: str, size: int, dtype: DType) -> Value:
        row = b.op("embed", arg(b, "ids"), given(suffix, VOCAB, size, dtype=DType.F32))
        return row if dtype is DType.F32 else b.op("cast", row, dtype=str(dtype))

    zeros = given("z", c.rows, c.groups, dtype=c.zero) if isinstance(c.zero, DType) else None
    out = b.op(
        "qlinear", embedded("x", c.k, c.x), given("q", c.rows, c.k, dtype=c.q),
        given("s", c.rows, c.groups, dtype=c.scale), zeros,
        given("o", c.rows, c.groups, dtype=c.scale) if c.offset else None,
        given("b", c.rows, dtype=DType.F32) if c.bias else None,
        embedded("r", c.n, c.out) if c.residual else None,
        group_size=c.group, zero=0 if isinstance(c.zero, DType) else c.zero, activation=c.activation,
        gated=c.gated, x_dtype=c.x_dtype and str(c.x_dtype), x_group_size=c.x_group, dtype=str(c.out),
    )  # fmt: skip
    return out if c.out is DType.F32 else b.op("cast", out, dtype="f32")


def graph(cases: dict[str, Case]) -> Graph:
    b, _ = paged_builder()
    outs = [add(b, name, c) for name, c in cases.items()]
    return b.graph([b.op("concat", *outs, axis=1) if len(outs) > 1 else outs[0]])


def model(cases: dict[str, Case], directory: Path, **options: Any) -> TritonModel:
    weights: dict[str, Array] = {}
    for seed, (name, c) in enumerate(cases.items()):
        weights |= matrices(name, c, seed)
    return TritonModel(graph(cases), weights, directory, **options)


def run(model: TritonModel, tokens: list[int]) -> Array:
    return model.step([], [Chunk(list(range(64)), 0, tokens)])


# --- the reference


def spread(a: Array, k: int, group: int) -> Array:
    return np.repeat(a, group or k, axis=1)[:, :k]


def floats(name: str, c: Case, given: dict[str, Array]) -> Array:
    """The matrix that codes stand for."""
    w = given[f"{name}.q"].astype(np.float64)
    zero = (
        given[f"{name}.z"].astype(np.float64)
        if isinstance(c.zero, DType)
        else np.full((c.rows, c.groups), c.zero)
    )
    w = (w - spread(zero, c.k, c.group)) * spread(given[f"{name}.s"].astype(np.float64), c.k, c.group)
    return w + spread(given[f"{name}.o"].astype(np.float64), c.k, c.group) if c.offset else w


def rounded(x: Array, dtype: DType, group: int) -> Array:
    """x by way of codes: a group at a time, in f32 as a kernel is to compute them."""
    out: Array = np.zeros(x.shape)
    most = np.float32(127 if dtype is I8 else 448)
    for row, to in zip(x.astype(np.float32), out, strict=True):
        for start in range(0, x.shape[1], group or x.shape[1]):
            part = slice(start, start + group if group else None)
            scale = np.abs(row[part]).max() / most
            if scale == 0:
                continue
            scaled = row[part] * (np.float32(1) / scale)
            codes = np.rint(scaled) if dtype is I8 else scaled.astype(ml_dtypes.float8_e4m3fn)
            to[part] = codes.astype(np.float64) * np.float64(scale)
    return out


def want(name: str, c: Case, given: dict[str, Array], tokens: list[int]) -> Array:
    x = given[f"{name}.x"][tokens].astype(c.x.numpy).astype(np.float64)
    x = x if c.x_dtype is None else rounded(x, c.x_dtype, c.x_group)
    y = x @ floats(name, c, given).T + (given[f"{name}.b"].astype(np.float64) if c.bias else 0)
    activate = ACTIVATIONS[c.activation]
    y = activate(y[:, : c.n]) * y[:, c.n :] if c.gated else activate(y)
    return y + given[f"{name}.r"][tokens].astype(c.out.numpy).astype(np.float64) if c.residual else y


def check(cases: dict[str, Case], model: TritonModel, tokens: list[int]) -> None:
    got, start = run(model, tokens), 0
    for name, c in cases.items():
        part, start = got[:, start : start + c.n], start + c.n
        y = want(name, c, model.weights, tokens)
        error = F32_ERROR if c.out is DType.F32 else BF16_ERROR
        np.testing.assert_allclose(part, y, rtol=error, atol=error * np.abs(y).max(), err_msg=name)


@pytest.fixture(scope="module")
def every_case(tmp_path_factory: pytest.TempPathFactory) -> TritonModel:
    return model(CASES, tmp_path_factory.mktemp("qlinear"))


@pytest.mark.parametrize("count", [1, 17, 67])
def test_every_case_is_close_to_float64(every_case: TritonModel, count: int) -> None:
    check(CASES, every_case, ids(count))


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(tmp_path: Path) -> None:
    cases = {name: CASES[name] for name in ("u4 of u4 zeros", "i8 by u4 zeros")}
    of, tokens = model(cases, tmp_path, invariant=True), ids(7)
    together = run(of, tokens)
    for start, size in [(0, 1), (6, 1), (2, 3)]:
        assert np.array_equal(run(of, tokens[start : start + size]), together[start : start + size])


def test_what_has_no_kernel_is_refused_by_name() -> None:
    case = Case(16, 32, U4, 32, 8)
    made = graph({"w": replace(case, q=DType.U2)})
    with pytest.raises(CodegenError, match=r"no Triton kernel for qlinear: weights of type u2"):
        generate(lower(made, "gpu"), find_device("cuda:sm_90"))
