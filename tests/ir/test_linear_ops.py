"""Linear, norms, rope, embedding and matmul against sums written out in Python."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ir.build import GraphBuilder
from ir.graph import Weight
from ir.interpret import interpret
from ir.ops import InferError
from ir.types import DType, Tensor
from tests.ir.run import result

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: max(x, 0.0),
    "silu": lambda x: x / (1 + math.exp(-x)),
    "gelu": lambda x: 0.5 * x * math.erfc(-x / math.sqrt(2)),
    "gelu_tanh": lambda x: x / (1 + math.exp(-2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "sigmoid": lambda x: 1 / (1 + math.exp(-x)),
    "tanh": math.tanh,
}


def dots(x: Any, w: Any) -> Any:
    """x wT, each element an exact sum."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    found = [[math.fsum(float(a) * float(b) for a, b in zip(r, c, strict=True)) for c in w] for r in rows]
    return np.array(found).reshape(*x.shape[:-1], len(w))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("extras", ["", "bias", "residual", "bias+residual"])
def test_linear(activation: str, gated: bool, extras: str) -> None:
    rng = np.random.default_rng(0)
    x, w, b = rng.normal(size=(2, 3, 5)), rng.normal(size=(6, 5)), rng.normal(size=6)
    r = rng.normal(size=(2, 3, 3 if gated else 6))
    y = dots(x, w) + (b if "bias" in extras else 0)
    act = np.vectorize(ACTIVATIONS[activation], otypes=[float])
    y = act(y[..., :3]) * y[..., 3:] if gated else act(y)
    y = y + (r if "residual" in extras else 0)
    operands = [x, w, b if "bias" in extras else None, r if "residual" in extras else None]
    got = result("linear", *operands, wide=True, activation=activation, gated=gated)
    np.testing.assert_allclose(got, y, rtol=1e-12, atol=1e-13)
    narrow = [None if o is None else o.astype(np.float32) for o in operands]
    np.testing.assert_allclose(
        result("linear", *narrow, activation=activation, gated=gated), y, rtol=1e-4, atol=1e-5
    )


def test_linear_on_nothing_and_one() -> None:
    assert result("linear", np.zeros((0, 5)), np.zeros((6, 5))).shape == (0, 6)
    assert result("linear", np.array([2.0]), np.array([[3.0]])).tolist() == [6]


def test_bf16_weights_are_widened_not_the_activations_narrowed() -> None:
    w = np.array([[1.0, 2.0**-8], [3.0, -1.0]]).astype(ml_dtypes.bfloat16)
    x = np.array([[1 + 2.0**-12, 1.0]], np.float32)
    assert result("linear", x, w).tolist() == dots(x, w).tolist()


def test_the_result_is_rounded_once_to_the_type_asked_for() -> None:
    """0.5 + 2^-9 is half way between two bf16: even down, and up once 2^-20 is added before it is rounded."""
    x, w = np.array([[1.0, 1.0]], ml_dtypes.bfloat16), np.array([[0.5, 2.0**-10]], ml_dtypes.bfloat16)
    half = np.array([[2.0**-9 - 2.0**-10]], np.float32)
    for extra, expected in ((0.0, 0.5), (2.0**-20, 0.5 + 2.0**-8)):
        got = result("linear", x, w, None, half + np.float32(extra), dtype="bf16")
        assert got.dtype == ml_dtypes.bfloat16 and got.tolist() == [[expected]]
    assert result("linear", x, w, dtype="f32").tolist() == [[0.5 + 2.0**-10]]
    assert result("linear", x, w).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_a_norm_rounds_to_the_type_asked_for(kind: str) -> None:
    x = np.random.default_rng(3).normal(size=(3, 7)).astype(np.float32)
    got = result(kind, x, eps=1e-5, dtype="bf16")
    assert got.dtype == ml_dtypes.bfloat16
    assert np.array_equal(got, result(kind, x, eps=1e-5).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("a", "b"), [((3, 4), (4, 5)), ((2, 1, 3, 4), (6, 4, 5)), ((1, 0), (0, 2)), ((7, 1, 1), (1, 1))]
)
def test_matmul(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=a), rng.normal(size=b)
    batch = np.broadcast_shapes(a[:-2], b[:-2])
    xs = np.broadcast_to(x, (*batch, *a[-2:])).reshape(math.prod(batch), *a[-2:])
    ys = np.broadcast_to(y, (*batch, *b[-2:])).reshape(math.prod(batch), *b[-2:])
    expected = np.array([dots(p, q.T) for p, q in zip(xs, ys, strict=True)]).reshape(*batch, a[-2], b[-1])
    np.testing.assert_allclose(result("matmul", x, y, wide=True), expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])
def test_norms(kind: str, rank: int, weighted: bool) -> None:
    rng = np.random.default_rng(2)
    x, w, b = rng.normal(2.0, size=(3, 2, 5)), rng.normal(size=(2, 5)[2 - rank :]), rng.normal(size=5)
    expected = np.empty_like(x)
    for index in np.ndindex(*x.shape[: 3 - rank]):
        row = [float(v) for v in x[index].ravel()]
        mean = math.fsum(row) / len(row) if kind == "layer_norm" else 0.0
        variance = math.fsum((v - mean) ** 2 for v in row) / len(row)
        expected[index] = np.reshape([(v - mean) / math.sqrt(variance + 1e-3) for v in row], x[index].shape)
    operands = [x, w] if weighted else [x]
    expected = expected * w if weighted else expected
    if kind == "layer_norm" and weighted:
        operands, expected = [x, w, b], expected + b
    np.testing.assert_allclose(result(kind, *operands, wide=True, eps=1e-3, rank=rank), expected, rtol=1e-12)


def test_a_norm_of_one_element_and_of_a_constant() -> None:
    assert result("layer_norm", np.array([[5.0]]), eps=1e-5).tolist() == [[0.0]]
    assert result("rms_norm", np.array([[-3.0]]), eps=0.0).tolist() == [[-1.0]]
    assert result("layer_norm", np.ones(2), None, np.array([1.0, 2.0]), eps=1e-5).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("width", "pairs", "offset"), [(8, 4, 0), (8, 3, 0), (9, 3, 2), (2, 1, 0), (5, 2, 1)]
)
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_each_pair_by_its_angle(width: int, pairs: int, offset: int, interleaved: bool) -> None:
    rng = np.random.default_rng(3)
    x, angle = rng.normal(size=(4, 3, width)), rng.normal(size=(4, 1, pairs)) * 3
    expected = x.copy()
    for t, h, p in np.ndindex(4, 3, pairs):
        i, j = (offset + 2 * p, offset + 2 * p + 1) if interleaved else (offset + p, offset + pairs + p)
        turned = complex(x[t, h, i], x[t, h, j]) * complex(math.cos(angle[t, 0, p]), math.sin(angle[t, 0, p]))
        expected[t, h, i], expected[t, h, j] = turned.real, turned.imag
    got = result("rope", x, np.cos(angle), np.sin(angle), wide=True, interleaved=interleaved, offset=offset)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-14)


def test_embed_takes_the_tables_type_or_the_given_one() -> None:
    table = np.array([[1.0, 2.5], [3.0, -0.0]]).astype(ml_dtypes.bfloat16)
    ids = np.array([[1, 0, 1]])
    assert result("embed", ids, table).dtype == ml_dtypes.bfloat16
    wide = result("embed", ids, table, dtype="f32")
    assert (
        wide.dtype == np.float32
        and wide.tolist() == [[[3, 0], [1, 2.5], [3, 0]]]
        and np.signbit(wide[0, 0, 1])
    )


def test_float64_mode_is_wide_and_narrow_types_still_round() -> None:
    b = GraphBuilder("g", {})
    x = b.input("x", Tensor(DType.F32, ()))
    third = b.op("div", x, Weight("w", Tensor(DType.F32, ())), name="third")
    b.op("cast", b.op("cast", third, dtype="bf16", name="narrow"), dtype="f32", name="back")
    run = interpret(b.graph([third]), {"x": 1.0}, {"w": np.float32(3)}, np.float64)  # type: ignore[dict-item]
    assert run.values["third"].dtype == np.float64 and float(run.values["third"]) == 1 / 3
    assert run.values["narrow"].dtype == ml_dtypes.bfloat16
    assert run.values["back"].dtype == np.float64 and float(run.values["back"]) == 0.333984375  # 171 / 512


@pytest.mark.parametrize(
    ("kind", "shapes", "attrs", "message"),
    [
        ("linear", [(2, 3), (4, 5)], {}, r"w is \[N,K\]"),
        ("linear", [(2, 3), (5, 3)], {"gated": True}, "even number of outputs, not 5"),
        ("linear", [(2, 3), (4, 3)], {"activation": "swish"}, "no activation 'swish'"),
        ("linear", [(2, 3), (4, 3), (3,)], {}, r"bias \[3\] is not \[4\]"),
        ("linear", [(2, 3), (4, 3), None, (2, 3)], {}, "residual"),
        ("matmul", [(2, 3), (2, 3)], {}, "do not multiply"),
        ("matmul", [(3,), (3, 2)], {}, "do not multiply"),
        ("rms_norm", [(2, 3)], {"eps": 1e-5, "rank": 3}, r"rank 3 is not in 1\.\.2"),
        ("rms_norm", [(2, 3), (2,)], {"eps": 1e-5}, "do not broadcast"),
        ("rms_norm", [(2, 3), (4, 2, 3)], {"eps": 1e-5}, "does not broadcast to"),
        ("rms_norm", [(2, 3)], {"eps": "small"}, "eps must be a number"),
        ("rope", [(2, 4), (2, 3), (2, 3)], {}, "3 pairs from 0 do not fit a head of 4"),
        ("rope", [(2, 4), (2, 2), (2, 2)], {"offset": 1}, "2 pairs from 1 do not fit a head of 4"),
        ("rope", [(2, 4), (2, 2), (2, 1)], {}, "do not fit"),
        ("rope", [(2, 4), (5, 2), (5, 2)], {}, "do not broadcast"),
        ("rope", [(), (1,), (1,)], {}, "do not fit"),
        ("embed", [(2,), (3, 4)], {}, "needs integer ids"),
        ("linear", [(2, 3), (4, 3)], {"dtype": "i32"}, "attribute dtype must be a float type, not i32"),
        ("rms_norm", [(2, 3)], {"eps": 1e-5, "dtype": "half"}, "attribute dtype must be one of"),
    ],
)  # fmt: skip
def test_what_does_not_fit(kind: str, shapes: list[Any], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferError, match=f"^{kind}: .*{message}"):
        result(kind, *(None if s is None else np.ones(s) for s in shapes), **attrs)
