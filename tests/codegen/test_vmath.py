"""Elementary functions against float64 (numpy and math), lane by lane."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.codegen.harness import best_level, build_cpp, pointer

Array = np.ndarray[Any, np.dtype[Any]]
erf, erfc = np.vectorize(math.erf, otypes=[float]), np.vectorize(math.erfc, otypes=[float])

REFERENCES: dict[str, Callable[[Array], Array]] = {
    "exp": np.exp,
    "exp2": np.exp2,
    "log": np.log,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "erf": erf,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x / (1 + np.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "floor": np.floor,
    "relu": lambda x: np.maximum(x, 0),
}
POSITIVE = ("log", "sqrt", "rsqrt")
ANGLES = ("sin", "cos")

SOURCE = (
    '#include "vmath.h"\nusing namespace octavo;\n'
    + "".join(
        f'extern "C" __attribute__((visibility("default"))) void f_{n}(const float* x, float* y, int64_t n) '
        f"{{ for (int64_t i = 0; i < n; i += W) store_n(y + i, {n}(load_n(x + i, n - i)), n - i); }}\n"
        for n in REFERENCES
    )
    + 'extern "C" __attribute__((visibility("default"))) '
    "void f_pow(const float* x, const float* y, float* z, int64_t n) "
    "{ for (int64_t i = 0; i < n; i++) z[i] = pow(x[i], y[i]); }\n"
)


@pytest.fixture(scope="module", params=sorted({best_level(), "baseline"}))
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_cpp(SOURCE, tmp_path_factory.mktemp("vmath"), request.param)


def call(library: ctypes.CDLL, name: str, x: Array) -> Array:
    y = np.full_like(x, np.nan)
    getattr(library, f"f_{name}")(
        ctypes.c_void_p(pointer(x)), ctypes.c_void_p(pointer(y)), ctypes.c_int64(len(x))
    )
    return y


def inputs(name: str) -> Array:
    rng = np.random.default_rng(7)
    if name in ANGLES:
        return (rng.uniform(-1, 1, 20000) * 10.0 ** rng.uniform(-3, 6, 20000)).astype(np.float32)
    if name == "exp2":
        return (-(10.0 ** rng.uniform(-6, 2, 20000))).astype(np.float32)
    spread = (rng.standard_normal(20000) * 10.0 ** rng.uniform(-4, 1.3, 20000)).astype(np.float32)
    return np.abs(spread) if name in POSITIVE else np.clip(spread, -80, 80)


def ulps(got: Array, want: Array) -> Array:
    return np.abs(got.astype(np.float64) - want) / np.spacing(
        np.maximum(np.abs(want), 1e-35).astype(np.float32)
    )


@pytest.mark.parametrize("name", REFERENCES)
def test_within_two_ulps_of_float64(library: ctypes.CDLL, name: str) -> None:
    x = inputs(name)
    with np.errstate(all="ignore"):
        want = REFERENCES[name](x.astype(np.float64))
    bound = {"sigmoid": 3.5, "silu": 3.5, "exp2": 2.5}.get(name, 2.0)
    assert ulps(call(library, name, x), want).max() <= bound


@pytest.mark.parametrize("name", REFERENCES)
def test_a_lane_depends_on_nothing_else(library: ctypes.CDLL, name: str) -> None:
    x = inputs(name)[:500]
    together = call(library, name, x)
    alone = np.concatenate([call(library, name, x[i : i + 1].copy()) for i in range(len(x))])
    shifted = call(library, name, x[3:].copy())
    assert np.array_equal(together.view(np.int32), alone.view(np.int32))
    assert np.array_equal(together[3:].view(np.int32), shifted.view(np.int32))


def test_the_edges_of_exp(library: ctypes.CDLL) -> None:
    x = np.array([-np.inf, -200, -104, -103, -90, 0, 88, 88.8, 200, np.inf, np.nan], np.float32)
    with np.errstate(over="ignore", under="ignore"):
        want = np.exp(x.astype(np.float64)).astype(np.float32)
    got = call(library, "exp", x)
    assert np.array_equal(np.isnan(got), np.isnan(want)) and np.isinf(got[7:10]).all()
    assert np.allclose(got[:7], want[:7], rtol=3e-7, atol=1.5e-45)


def test_the_edges_of_exp2(library: ctypes.CDLL) -> None:
    x = np.array([0, -1, -126, -127, -127.5, -200, -np.inf, np.nan], np.float32)
    got = call(library, "exp2", x)
    assert got[:7].tolist() == [1, 0.5, 2.0**-126, 0, 0, 0, 0] and np.isnan(got[7])
    below = call(library, "exp2", np.linspace(-127, -126, 1000, dtype=np.float32))
    assert ((below >= 0) & (below <= 2.0**-126)).all()
    poisoned = np.array([0x7FFFFFFF, 0xFFFFFFFF, 0xFFC00001], np.uint32).view(np.float32)
    assert np.isnan(call(library, "exp2", poisoned)).all()


@pytest.mark.parametrize("name", ["log", "sqrt", "tanh", "gelu", "erf", "silu", "softplus"])
def test_special_values(library: ctypes.CDLL, name: str) -> None:
    x = np.array([0.0, -0.0, np.inf, np.nan, -1.0, 1e-42], np.float32)
    with np.errstate(all="ignore"):
        want = REFERENCES[name](x.astype(np.float64)).astype(np.float32)
    if name == "silu":
        want[2] = np.inf
    assert np.allclose(call(library, name, x), want, rtol=3e-7, atol=1e-45, equal_nan=True)


def test_pow(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(3)
    x = np.concatenate([rng.uniform(0.01, 20, 1000), [-2, -2, -2, 0, 0, 5]]).astype(np.float32)
    y = np.concatenate([rng.uniform(-6, 6, 1000), [3, 2, 0.5, 2, 0, 0]]).astype(np.float32)
    z = np.full_like(x, np.nan)
    library.f_pow(*(ctypes.c_void_p(pointer(a)) for a in (x, y, z)), ctypes.c_int64(len(x)))
    with np.errstate(invalid="ignore"):
        want = np.power(x.astype(np.float64), y.astype(np.float64))
    assert np.allclose(z, want, rtol=1.3e-7, equal_nan=True)
