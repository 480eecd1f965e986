"""qlinear, qembed, quantize and dequantize against float64, and their bits whatever rows are beside a row."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from ir.graph import Graph, Value, Weight
from ir.types import DType
from tests.codegen.harness import Chunk, Model, aligned, arg, levels, paged_builder, pointer, weight

Array = np.ndarray[Any, np.dtype[Any]]
VOCAB = 48
LARGEST = {"i8": 127, "f8e4m3": 448}


@dataclass(frozen=True)
class Case:
    """zero: of all, or "each" group its own. scale: type of scales and offsets. x: (type, group size)."""

    k: int
    n: int
    codes: str
    group: int
    zero: int | str = 0
    offset: bool = False
    scale: str = "f16"
    x: tuple[str | None, int] = ("i8", 32)
    bias: bool = False
    residual: bool = False
    activation: str = "none"
    gated: bool = False
    x_type: str = "f32"

    @property
    def groups(self) -> int:
        return -(-self.k // self.group) if self.group else 1

    @property
    def width(self) -> int:
        return self.n // 2 if self.gated else self.n


CASES = {
    # the usual formats: codes in groups of 32, 64, 128, or one group
    "u4": Case(96, 48, "u4", 32, 8),
    "u4_64": Case(131, 41, "u4", 64, 8, bias=True),
    "u4_128": Case(257, 17, "u4", 128, 8, residual=True),
    "u4_wide": Case(1537, 33, "u4", 32, 8, bias=True, residual=True),
    "u4_whole": Case(70, 16, "u4", 0, 8, x=("i8", 0)),
    "u4_gated": Case(64, 2 * 23, "u4", 32, 8, gated=True, activation="silu", bias=True),
    "u4_by_row": Case(289, 15, "u4", 128, 8, x=("i8", 0)),
    "u4_one": Case(1, 1, "u4", 32, 8),
    "u4_sixteens": Case(53, 16, "u4", 16, 8, x=("i8", 64)),
    "u4_offsets": Case(100, 31, "u4", 32, offset=True),
    "u4_offsets_whole": Case(37, 19, "u4", 0, offset=True, x=("i8", 0)),
    "u4_zeros": Case(130, 47, "u4", 128, "each"),
    "i8": Case(97, 50, "i8", 32),
    "i8_whole": Case(1300, 17, "i8", 0, x=("i8", 0), bias=True),
    "i8_zero": Case(15, 16, "i8", 32, 3, residual=True),
    "i8_sixteens": Case(95, 29, "i8", 16),
    "u8": Case(63, 20, "u8", 32, 32),
    "i8_gated": Case(33, 2 * 16, "i8", 64, gated=True, activation="silu", residual=True),
    "i8_bf16": Case(71, 32, "i8", 32, x_type="bf16"),
    "u8_zeros": Case(17, 15, "u8", 32, "each"),
    "u8_offsets": Case(80, 37, "u8", 32, offset=True, scale="f32"),
    # x as it is, or rounded to a grid that is none of codes'
    "u4_exact": Case(131, 33, "u4", 32, 8, x=(None, 0), bias=True),
    "u4_zeros_exact": Case(45, 17, "u4", 32, "each", x=(None, 0), residual=True),
    "u8_offsets_exact": Case(64, 16, "u8", 32, offset=True, scale="f32", x=(None, 0)),
    "i8_exact_bf16": Case(97, 2 * 21, "i8", 32, x=(None, 0), gated=True, activation="silu", x_type="bf16"),
    "f8": Case(150, 35, "f8e4m3", 0, scale="f32", x=(None, 0)),
    "f8_f8": Case(150, 35, "f8e4m3", 0, scale="f32", x=("f8e4m3", 0)),
    "u4_far_zero": Case(40, 16, "u4", 32, 40),
    "u4_odd_rows": Case(41, 16, "u4", 32, 8, x=("i8", 20)),
}
FEW = (
    "u4",
    "u4_wide",
    "u4_whole",
    "i8",
    "i8_whole",
    "u8",
    "u8_zeros",
    "u4_exact",
    "f8",
)  # where little differs


def operands(name: str, case: Case) -> dict[str, Weight | None]:
    shape = (case.n, case.groups)
    zero = weight(f"{name}.zero", *shape, dtype=DType.U8 if case.codes != "i8" else DType.I8)
    return {
        "q": weight(f"{name}.q", case.n, case.k, dtype=DType(case.codes)),
        "scale": weight(f"{name}.scale", *shape, dtype=DType(case.scale)),
        "zero": zero if case.zero == "each" else None,
        "offset": weight(f"{name}.offset", *shape, dtype=DType(case.scale)) if case.offset else None,
    }


def graph(cases: dict[str, Case]) -> Graph:
    b, _ = paged_builder()
    results: list[Value] = []
    for name, case in cases.items():
        x = b.op("embed", arg(b, "ids"), weight(f"{name}.x", VOCAB, case.k))
        x = b.op("cast", x, dtype="bf16") if case.x_type == "bf16" else x
        r = b.op("embed", arg(b, "ids"), weight(f"{name}.r", VOCAB, case.width)) if case.residual else None
        bias = weight(f"{name}.b", case.n) if case.bias else None
        options = {"group_size": case.group, "zero": 0 if case.zero == "each" else case.zero, "dtype": "f32",
                   "x_dtype": case.x[0], "x_group_size": case.x[1], "activation": case.activation,
                   "gated": case.gated}  # fmt: skip
        results.append(b.op("qlinear", x, *operands(name, case).values(), bias, r, loc=name, **options))
    return b.graph([b.op("concat", *results, axis=1)])


def draw(case: Case, name: str, rng: np.random.Generator) -> dict[str, Array]:
    """Weights of a case: among them a group of zeros, and a row whose codes are all the same."""
    low, high = {"u4": (0, 16), "u8": (0, 256), "i8": (-128, 128)}.get(case.codes, (0, 0))
    if case.codes == "f8e4m3":
        q = rng.normal(0, 30, (case.n, case.k)).astype(DType.F8E4M3.numpy)
    else:
        q = rng.integers(low, high, (case.n, case.k)).astype(DType(case.codes).numpy)
    q[case.n // 2] = q[0, 0]
    groups = (case.n, case.groups)
    scale = rng.uniform(-0.02, 0.03, groups)
    scale[-1, -1] = 0
    kept = DType(case.scale).numpy
    found = {"q": q, "scale": scale.astype(kept), "offset": rng.normal(0, 0.1, groups).astype(kept),
             "zero": rng.integers(low, max(1, high), groups), "x": rng.normal(0, 1, (VOCAB, case.k)),
             "r": rng.normal(0, 1, (VOCAB, case.width)), "b": rng.normal(0, 1, case.n)}  # fmt: skip
    found["x"][3] = 0  # a row of zeros
    found["x"][5] = 2.5  # a constant one
    found["zero"] = found["zero"].astype(np.int8 if case.codes == "i8" else np.uint8)
    single = ("x", "r", "b")
    return {f"{name}.{n}": a.astype(np.float32) if n in single else a for n, a in found.items()}


def by_group(values: Array, k: int, size: int) -> Array:
    return np.repeat(values.astype(np.float64), size or k, axis=1)[:, :k]


def matrix(case: Case, name: str, weights: dict[str, Array]) -> Array:
    """The floats that codes stand for."""
    part = lambda n: by_group(weights[f"{name}.{n}"], case.k, case.group)  # noqa: E731
    zero = part("zero") if isinstance(case.zero, str) else case.zero
    w = (weights[f"{name}.q"].astype(np.float64) - zero) * part("scale")
    return w + part("offset") if case.offset else w


def rounded(x: Array, dtype: str | None, size: int) -> Array:
    """Rows of x on their groups' grids, in the steps that f32 allows."""
    if dtype is None:
        return x.astype(np.float64)
    k, parts = x.shape[1], []
    for start in range(0, k, size or k):
        part = x[:, start : start + (size or k)].astype(np.float32)
        scale = np.abs(part).max(1, keepdims=True) / np.float32(LARGEST[dtype])
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
        code = np.clip(part * inverse, -LARGEST[dtype], LARGEST[dtype])
        code = np.rint(code) if dtype == "i8" else code.astype(DType.F8E4M3.numpy)
        parts.append(code.astype(np.float64) * scale.astype(np.float64))
    return np.concatenate(parts, 1)


def activate(x: Array, kind: str) -> Array:
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "gelu_tanh":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x


def expected(case: Case, name: str, weights: dict[str, Array], tokens: list[int]) -> Array:
    x = weights[f"{name}.x"][tokens]
    x = x.astype(DType(case.x_type).numpy).astype(np.float32)
    y = rounded(x, *case.x) @ matrix(case, name, weights).T
    y = y + weights[f"{name}.b"] if case.bias else y
    if case.gated:
        y = activate(y[:, : case.width], case.activation) * y[:, case.width :]
    else:
        y = activate(y, case.activation)
    return y + weights[f"{name}.r"][tokens] if case.residual else y


@dataclass
class Built:
    model: Model
    cases: dict[str, Case]

    def spans(self) -> Iterator[tuple[str, Case, slice]]:
        """The columns of the result that are each case's."""
        start = 0
        for name, case in self.cases.items():
            yield name, case, slice(start, start + case.width)
            start += case.width


@pytest.fixture(scope="module", params=levels())
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    cases = {name: CASES[name] for name in FEW} if request.param == "baseline" else CASES
    rng = np.random.default_rng()
    weights = {key: a for name, case in cases.items() for key, a in draw(case, name, rng).items()}
    return Built(Model(graph(cases), weights, tmp_path_factory.mktemp("qlinear"), request.param), cases)


def ids(count: int) -> list[int]:
    return [(i * 7 + 3) % VOCAB for i in range(count)]


def run(model: Model, engine: int, tokens: list[int]) -> Array:
    return model.step(engine, [], [Chunk(list(range(64)), 0, tokens)])


def forward(model: Model, tokens: list[int], threads: int = 2) -> Array:
    engine = model.open(threads)
    out = run(model, engine, tokens)
    model.library.octavo_close(engine)
    return out


@pytest.mark.parametrize("count", [*range(1, 18), 33, 150])
def test_close_to_float64(built: Built, count: int) -> None:
    tokens = ids(count)
    got = forward(built.model, tokens)
    for name, case, columns in built.spans():
        want = expected(case, name, built.model.weights, tokens)
        error = np.abs(got[:, columns] - want) / (np.abs(want) + want.std() + 1e-3)
        assert error.max() < 3e-5, (name, error.max())


def test_a_row_has_the_same_bits_alone_in_batches_and_on_any_number_of_threads(built: Built) -> None:
    model, tokens = built.model, ids(150)
    together = forward(model, tokens, threads=1)
    for threads in (2, 3):
        assert np.array_equal(forward(model, tokens, threads), together)
    engine = model.open(2)
    for start, size in [(0, 1), (5, 1), (149, 1), (3, 2), (8, 6), (0, 14), (1, 15), (20, 16), (33, 31)]:
        part = run(model, engine, tokens[start : start + size])
        assert np.array_equal(part, together[start : start + size]), (start, size)
    model.library.octavo_close(engine)


def test_a_row_that_is_not_finite_spoils_itself_alone(built: Built) -> None:
    tokens = ids(20)
    plain, bad = forward(built.model, tokens), [4, 11]
    for name in built.cases:
        packed = built.model.packed[f"{name}.x.table"].view(np.float32).reshape(VOCAB, -1)
        assert np.array_equal(packed, built.model.weights[f"{name}.x"])
    model = built.model
    engine = model.open(2)
    spoilt = poisoned(model, built.cases, [tokens[i] for i in bad])
    model.library.octavo_set_weights(ctypes.c_void_p(engine), spoilt)
    got = run(model, engine, tokens)
    model.library.octavo_close(engine)
    others = [i for i in range(20) if tokens[i] not in {tokens[b] for b in bad}]
    assert np.array_equal(got[others], plain[others])
    for name, case, columns in built.spans():
        if case.k > 1 and case.x_type == "f32":
            assert not np.isfinite(got[bad][:, columns]).all(1).any(), name


def poisoned(model: Model, cases: dict[str, Case], rows: list[int]) -> Any:
    """Pointers to the model's arrays, with a NaN and an infinity in rows of what x is looked up in."""
    order = list(model.generated.weight_order)
    arrays = {name: np.array(model.packed[name]) for name in order}
    for name, case in cases.items():
        table = arrays[f"{name}.x.table"].view(np.float32).reshape(VOCAB, case.k)
        table[rows[0], case.k // 2], table[rows[1], -1] = np.nan, np.inf
    model.kept = [aligned(a.size, np.uint8, a) for a in arrays.values()]  # type: ignore[attr-defined]
    return (ctypes.c_void_p * len(order))(*(pointer(a) for a in model.kept))  # type: ignore[attr-defined]
