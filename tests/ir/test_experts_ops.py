"""Linears of chosen experts against one linear after the other, in float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ir.interpret import InterpretError
from ir.ops import InferError
from tests.ir.run import result

E, N, K = 5, 6, 33
ACTIVATIONS = {"none": lambda x: x, "relu": lambda x: np.maximum(x, 0), "tanh": np.tanh}


def one_by_one(x: Any, w: Any, experts: Any, bias: Any, activation: str, gated: bool) -> Any:
    """Slot j of token t, from matrices w [E,N,K]."""
    act = ACTIVATIONS[activation]
    out = []
    for t, j in np.ndindex(*experts.shape):
        e = experts[t, j]
        y = w[e] @ (x[t, j] if x.ndim == 3 else x[t]) + (0 if bias is None else bias[e])
        out.append(act(y[: N // 2]) * y[N // 2 :] if gated else act(y))
    return np.array(out).reshape(*experts.shape, N // 2 if gated else N)


def problem(tokens: int, slots: int, own_rows: bool) -> tuple[Any, ...]:
    """x, w [E,N,K], experts (some of them twice for a token, one never), bias."""
    rng = np.random.default_rng(tokens * 10 + slots)
    shape = (tokens, slots, K) if own_rows else (tokens, K)
    experts = rng.integers(0, E - 1, (tokens, slots)).astype(np.int32)
    return rng.normal(size=shape), rng.normal(size=(E, N, K)), experts, rng.normal(size=(E, N))


@pytest.mark.parametrize("own_rows", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("tokens", "slots"), [(0, 2), (1, 1), (7, 2), (17, 4)])
def test_moe_linear(tokens: int, slots: int, activation: str, gated: bool, own_rows: bool) -> None:
    x, w, experts, bias = problem(tokens, slots, own_rows)
    attrs: dict[str, Any] = {"num_experts": E, "activation": activation, "gated": gated}
    for b in (None, bias):
        found = result("moe_linear", x, w.reshape(E * N, K), experts, b, wide=True, **attrs)
        expected = one_by_one(x, w, experts, b, activation, gated)
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_a_token_alone_and_leading_axes() -> None:
    x, w, experts, _ = problem(6, 2, own_rows=False)
    stacked = w.reshape(E * N, K)
    all_of_them = result("moe_linear", x, stacked, experts, wide=True, num_experts=E)
    alone = result("moe_linear", x[3], stacked, experts[3], wide=True, num_experts=E)
    np.testing.assert_allclose(alone, all_of_them[3], rtol=1e-13)
    apart = result(
        "moe_linear", x.reshape(2, 3, K), stacked, experts.reshape(2, 3, 2), wide=True, num_experts=E
    )
    np.testing.assert_allclose(apart.reshape(6, 2, N), all_of_them, rtol=1e-13)


def test_the_result_is_rounded_once_to_the_type_asked_for() -> None:
    x, w = np.array([[1.0, 1.0]], ml_dtypes.bfloat16), np.array([[0.5, 2.0**-9]] * 2, ml_dtypes.bfloat16)
    experts, bias = np.array([[1]], np.int32), np.array([[0.0], [2.0**-20]], np.float32)
    found = result("moe_linear", x, w, experts, bias, num_experts=2)
    assert found.dtype == ml_dtypes.bfloat16 and found.tolist() == [[[0.5 + 2.0**-8]]]
    wide = result("moe_linear", x, w, experts, bias, num_experts=2, dtype="f32")
    assert wide.dtype == np.float32 and wide.tolist() == [[[np.float32(0.5 + 2.0**-9 + 2.0**-20)]]]


@pytest.mark.parametrize("parts", ["scale", "zero", "zeros", "offset"])
@pytest.mark.parametrize("size", [0, 16])
@pytest.mark.parametrize("x_dtype", [None, "i8"])
@pytest.mark.parametrize("own_rows", [False, True])
def test_qmoe_linear(parts: str, size: int, x_dtype: str | None, own_rows: bool) -> None:
    """On the matrix and the rows that dequantize gives."""
    x, _, experts, bias = problem(7, 2, own_rows)
    rng = np.random.default_rng(3)
    groups = (E * N, -(-K // size) if size else 1)
    codes, scale = rng.integers(0, 16, (E * N, K)).astype(np.uint8), rng.normal(size=groups)
    zeros = rng.integers(0, 16, groups).astype(np.uint8) if parts == "zeros" else None
    offset = rng.normal(size=groups) if parts == "offset" else None
    attrs: dict[str, Any] = {"group_size": size, "zero": 8 if parts == "zero" else 0}
    w = result("dequantize", codes, scale, zeros, offset, wide=True, **attrs).reshape(E, N, K)
    rounded = x
    if x_dtype is not None:
        flat = x.reshape(-1, K)
        scales = np.repeat(
            np.abs(np.pad(flat, ((0, 0), (0, -K % 16))).reshape(len(flat), -1, 16)).max(-1) / 127, 16, axis=1
        )[:, :K].astype(np.float32)
        rounded = (np.rint(flat / scales) * scales).reshape(x.shape)
    given = (x, codes, scale, experts, zeros, offset, bias)
    found = result(
        "qmoe_linear", *given, wide=True, num_experts=E, activation="relu", gated=True,
        x_dtype=x_dtype, x_group_size=16, **attrs,
    )  # fmt: skip
    expected = one_by_one(rounded, w, experts, bias, "relu", gated=True)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)
    assert x_dtype is None or np.abs(found - one_by_one(x, w, experts, bias, "relu", True)).max() > 1e-2


@pytest.mark.parametrize("bad", [-1, E])
def test_an_expert_that_is_not_there_is_an_error(bad: int) -> None:
    x, w, experts, _ = problem(7, 2, own_rows=False)
    experts[3, 1] = bad
    with pytest.raises(InterpretError, match=f"leave an axis of {E}"):
        result("moe_linear", x, w.reshape(E * N, K), experts, wide=True, num_experts=E)


X, W, CHOSEN = np.ones((7, K)), np.ones((E * N, K)), np.zeros((7, 2), np.int32)


@pytest.mark.parametrize(
    ("operands", "attrs", "message"),
    [
        ([X, W, CHOSEN], {"num_experts": 4}, r"w \[30, 33\] is not \[E\*N,K\] of 4 experts"),
        ([X, W, CHOSEN], {"num_experts": 0}, "from 1"),
        ([X, W, CHOSEN], {"num_experts": 10, "gated": True}, "even number of outputs, not 3"),
        ([X, W[:, :5], CHOSEN], {"num_experts": E}, "do not fit"),
        ([X[:5], W, CHOSEN], {"num_experts": E}, r"neither \[..,K\] nor \[..,k,K\]"),
        ([X, W, CHOSEN.astype(np.float64)], {"num_experts": E}, "experts must be integers"),
        ([X, W, CHOSEN, np.ones((N, E))], {"num_experts": E}, r"is not floats \[5, 6\]"),
        ([X, W.astype(np.int32), CHOSEN], {"num_experts": E}, "must be a float tensor"),
        ([X, W, CHOSEN], {"num_experts": E, "activation": "swish"}, "no activation"),
    ],
)
def test_what_does_not_fit(operands: list[Any], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferError, match=f"^moe_linear: .*{message}"):
        result("moe_linear", *operands, **attrs)
