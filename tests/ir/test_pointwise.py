"""Pointwise ops against formulas in Python's own floats, element by element."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ir.build import infer
from ir.graph import Scalar, Weight
from ir.ops import OPS, InferError
from ir.types import DType, Tensor
from tests.ir.run import result

INF, NAN = math.inf, math.nan


def phi(x: float) -> float:
    return 0.5 * math.erfc(-x / math.sqrt(2))


def tanh_gelu(x: float) -> float:
    return x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


UNARY: dict[str, Callable[[float], float]] = {
    "neg": lambda x: -x,
    "abs": lambda x: x if x > 0 else -x,
    "exp": math.exp,
    "tanh": math.tanh,
    "sin": math.sin,
    "cos": math.cos,
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "erf": math.erf,
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: x * phi(x),
    "gelu_tanh": tanh_gelu,
    "softplus": lambda x: math.log1p(math.exp(x)),
    "floor": math.floor,
}
POSITIVE: dict[str, Callable[[float], float]] = {
    "log": math.log,
    "sqrt": math.sqrt,
    "rsqrt": lambda x: x**-0.5,
}
BINARY: dict[str, Callable[[float, float], Any]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "maximum": max,
    "minimum": min,
    "floordiv": lambda x, y: math.floor(x / y),
    "mod": lambda x, y: x % y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
}
OTHER = {"pow", "and", "or", "not", "where", "cast", "clamp"}


def test_every_pointwise_op_is_tested_here() -> None:
    assert {k for k, op in OPS.items() if op.pointwise} == {*UNARY, *POSITIVE, *BINARY, *OTHER}


@pytest.mark.parametrize("kind", [*UNARY, *POSITIVE])
def test_unary(kind: str) -> None:
    x = np.random.default_rng(0).normal(scale=3, size=(3, 1, 7))
    x = np.abs(x) + 0.1 if kind in POSITIVE else x
    expected = np.vectorize((UNARY | POSITIVE)[kind], otypes=[float])(x)
    np.testing.assert_allclose(result(kind, x, wide=True), expected, rtol=1e-12, atol=1e-14)
    narrow = result(kind, x.astype(np.float32))
    assert narrow.dtype == np.float32
    np.testing.assert_allclose(narrow, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", BINARY)
@pytest.mark.parametrize(
    "shapes", [((3, 5), (3, 5)), ((3, 1), (1, 5)), ((5,), (2, 3, 5)), ((1,), (0, 3)), ((), (4,))]
)
def test_binary_broadcasts(kind: str, shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    rng = np.random.default_rng(1)
    x, y = (rng.integers(-3, 4, s) + 0.5 * rng.integers(0, 2, s) for s in shapes)
    y = np.asarray(np.where(y == 0, 1.0, y))
    expected = (
        np.vectorize(BINARY[kind], otypes=[float])(*np.broadcast_arrays(x, y)) if 0 not in shapes[1] else None
    )
    got = result(kind, np.asarray(x), y, wide=True)
    assert got.shape == np.broadcast_shapes(*shapes)
    if expected is not None:
        np.testing.assert_allclose(got.astype(float), expected, rtol=1e-15)


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.int8, np.uint8])
def test_integers_stay_integers(dtype: Any) -> None:
    x, y = np.array([7, 9, 100], dtype), np.array([2, 4, 3], dtype)
    for kind in ("add", "sub", "mul", "floordiv", "mod", "maximum", "minimum"):
        got = result(kind, x, y)
        exact = [int(BINARY[kind](int(a), int(b))) for a, b in zip(x, y, strict=True)]
        bits = 8 * x.itemsize
        assert (
            got.dtype == dtype
            and [(int(v) - e) % 2**bits for v, e in zip(got, exact, strict=True)] == [0] * 3
        )
    assert result("pow", x, 2).dtype == dtype


def test_integer_division_and_remainder_go_down() -> None:
    x, y = np.array([-7, 7, -7, 7]), np.array([2, 2, -2, -2])
    assert list(result("floordiv", x, y)) == [-4, 3, 3, -4]
    assert list(result("mod", x, y)) == [1, 1, -1, -1]


def test_a_literal_takes_the_type_beside_it() -> None:
    assert result("add", np.ones(2, np.float16), 1).dtype == np.float16
    assert result("mul", 2, np.ones(2, np.int8)).dtype == np.int8
    assert list(result("sub", 1.0, np.array([0.25, 3], np.float32))) == [0.75, -2]
    assert result("pow", np.array([3.0, -2.0]), 2).tolist() == [9, 4]


def test_special_values() -> None:
    x = np.array([0.0, -0.0, INF, -INF, NAN], np.float32)
    assert np.signbit(result("neg", x))[:2].tolist() == [True, False]
    assert result("exp", x)[:4].tolist() == [1, 1, INF, 0]
    assert result("sigmoid", x)[:4].tolist() == [0.5, 0.5, 1, 0]
    assert result("tanh", x)[:4].tolist() == [0, 0, 1, -1]
    assert result("softplus", x)[2:4].tolist() == [INF, 0]
    assert result("rsqrt", x)[0] == INF and result("log", x)[0] == -INF
    assert (
        np.isnan(result("log", np.array([-1.0]))).all() and np.isnan(result("sqrt", np.array([-1.0]))).all()
    )
    assert result("div", np.array([1.0, -1.0, 0.0]), np.zeros(3))[:2].tolist() == [INF, -INF]
    assert np.isnan(result("relu", x)[4]) and np.isnan(result("maximum", x, 0.0)[4])
    for kind in set(UNARY) - {"floor", "abs", "neg"}:
        assert np.isnan(result(kind, x)[4])
    assert result("lt", x, x).tolist() == [False] * 5 and result("ne", x, x).tolist() == [False] * 4 + [True]
    assert result("sigmoid", np.array([-800.0, 800.0], np.float32)).tolist() == [0, 1]


def test_logic() -> None:
    x, y = np.array([[True], [False]]), np.array([True, False])
    assert result("and", x, y).tolist() == [[True, False], [False, False]]
    assert result("or", x, y).tolist() == [[True, True], [True, False]]
    assert result("not", y).tolist() == [False, True]
    assert result("eq", y, True).tolist() == [True, False]


def test_where_selects_and_never_multiplies() -> None:
    cond = np.array([[True], [False]])
    got = result("where", cond, np.array([1.0, NAN], np.float32), 0.0)
    assert got.dtype == np.float32 and got[1].tolist() == [0, 0] and got[0, 0] == 1 and np.isnan(got[0, 1])
    assert result("where", cond, -INF, np.ones((1, 1))).tolist() == [[-INF], [1]]


def test_clamp() -> None:
    x = np.array([-2.0, 0.5, 3.0, NAN])
    assert result("clamp", x, low=0.0, high=1.0)[:3].tolist() == [0, 0.5, 1]
    assert np.isnan(result("clamp", x, low=0.0, high=1.0)[3])
    assert result("clamp", x, low=0.0)[:3].tolist() == [0, 0.5, 3] and result("clamp", x)[:3].tolist() == [
        -2,
        0.5,
        3,
    ]
    assert result("clamp", np.array([-5, 5], np.int8), low=-1, high=1).tolist() == [-1, 1]


@pytest.mark.parametrize(
    ("given", "dtype", "expected"),
    [
        (np.array([2.9, -2.9]), "i32", [2, -2]),
        (np.array([0.0, -0.5, 2.0]), "bool", [False, True, True]),
        (np.array([True, False]), "f32", [1.0, 0.0]),
        (np.array([300, -1]), "u8", [44, 255]),
        (np.array([1.0, 65520.0]), "f16", [1.0, INF]),
        (np.array([1 + 2.0**-9, 1 + 3 * 2.0**-9]), "bf16", [1.0, 1 + 2.0**-7]),
        (np.array([1 + 2.0**-8, 1 + 3 * 2.0**-8]), "bf16", [1.0, 1 + 2.0**-6]),
    ],
)
def test_cast(given: Any, dtype: str, expected: list[Any]) -> None:
    got = result("cast", given, dtype=dtype)
    assert got.dtype == DType(dtype).numpy and got.astype(np.float64).tolist() == expected


def test_narrow_floats_are_computed_wide_and_rounded_once() -> None:
    """Rounding after each step of silu gives other values than rounding x / (1 + exp(-x)) once."""
    x = np.linspace(-6, 6, 200).astype(ml_dtypes.bfloat16)
    got = result("silu", x)
    exact = [v / (1 + math.exp(-v)) for v in x.astype(float)]
    assert got.dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(got, np.array(exact).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("kind", "types", "attrs"),
    [
        ("add", (DType.BOOL, DType.BOOL), {}),
        ("neg", (DType.BOOL,), {}),
        ("div", (DType.I32, DType.I32), {}),
        ("exp", (DType.I32,), {}),
        ("and", (DType.F32, DType.F32), {}),
        ("add", (DType.F32, DType.F64), {}),
        ("where", (DType.F32, DType.F32, DType.F32), {}),
        ("add", (DType.I8, 200), {}),
        ("add", (1.0, 2.0), {}),
        ("clamp", (DType.I32,), {"low": 0.5}),
        ("clamp", (DType.BOOL,), {}),
        ("cast", (DType.F32,), {"dtype": "f31"}),
        ("cast", (DType.F32,), {"dtype": 3}),
        ("where", (DType.BOOL, 1.0, 2.0), {}),
        ("eq", (DType.BOOL, 1), {}),
    ],
)
def test_operands_that_do_not_fit(kind: str, types: tuple[Any, ...], attrs: dict[str, Any]) -> None:
    args = [Weight("w", Tensor(t, (2,))) if isinstance(t, DType) else Scalar(t) for t in types]
    with pytest.raises(InferError, match=f"^{kind}: .* \\(at model.x\\)$"):
        infer(kind, args, attrs, "model.x")


def test_shapes_that_do_not_broadcast() -> None:
    with pytest.raises(InferError, match=r"shapes \[2\], \[3\] do not broadcast"):
        result("add", np.ones(2), np.ones(3))
