"""Ops that move elements, and reductions, against loops over indices."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from ir.interpret import InterpretError
from ir.ops import InferError
from tests.ir.run import result, results

X = np.arange(24.0).reshape(2, 3, 4)


def by_index(shape: tuple[int, ...], element: Any) -> Any:
    """An array from a function of its index."""
    out = np.empty(shape)
    for index in itertools.product(*map(range, shape)):
        out[index] = element(*index)
    return out


def test_moves() -> None:
    np.testing.assert_array_equal(
        result("transpose", X, perm=(2, 0, 1)), by_index((4, 2, 3), lambda a, b, c: X[b, c, a])
    )
    np.testing.assert_array_equal(
        result("reshape", X, shape=(4, 6)), by_index((4, 6), lambda i, j: 6 * i + j)
    )
    np.testing.assert_array_equal(
        result("expand", X[:, :1], shape=(5, 2, 3, 4)), by_index((5, 2, 3, 4), lambda a, b, c, d: X[b, 0, d])
    )
    assert result("reshape", np.array(7.0), shape=(1, 1)).tolist() == [[7]]
    assert result("reshape", np.zeros((0, 3)), shape=(3, 0, 5)).shape == (3, 0, 5)


@pytest.mark.parametrize(
    ("start", "stop", "step"), [(0, 4, 1), (1, 3, 1), (0, 4, 2), (1, 4, 2), (0, 4, 3), (2, 2, 1)]
)
def test_slice(start: int, stop: int, step: int) -> None:
    kept = [i for i in range(4) if start <= i < stop and (i - start) % step == 0]
    got = result("slice", X, axis=2, start=start, stop=stop, step=step)
    np.testing.assert_array_equal(got, by_index((2, 3, len(kept)), lambda a, b, c: X[a, b, kept[c]]))


def test_concat_and_split_undo_each_other() -> None:
    parts = results("split", X, axis=1, sizes=(1, 0, 2))
    assert [p.shape for p in parts] == [(2, 1, 4), (2, 0, 4), (2, 2, 4)]
    np.testing.assert_array_equal(parts[2], by_index((2, 2, 4), lambda a, b, c: X[a, b + 1, c]))
    np.testing.assert_array_equal(result("concat", *parts, axis=1), X)


def test_constants() -> None:
    iota = result("iota", size=5)
    assert iota.dtype == np.int32 and iota.tolist() == [0, 1, 2, 3, 4]
    assert result("iota", size=2, dtype="f16").dtype == np.float16 and result("iota", size=0).shape == (0,)
    assert result("full", shape=(2,), value=-math.inf).tolist() == [-math.inf] * 2
    assert result("full", shape=(), value=True, dtype="bool").dtype == np.bool_
    assert int(result("dim", size=7)) == 7


def test_gathers() -> None:
    at = np.array([[2, 0]])
    np.testing.assert_array_equal(
        result("take", X, at, axis=1), by_index((2, 1, 2, 4), lambda a, b, c, d: X[a, at[b, c], d])
    )
    assert result("take", X, np.array(1), axis=0).tolist() == X[1].tolist()
    assert result("take", np.arange(3.0), np.array(2), axis=0).shape == ()
    np.testing.assert_array_equal(result("take_rows", X, np.array([1, 1, 0])), X[[1, 1, 0]])
    assert result("take_rows", X, np.array([], np.int32)).shape == (0, 3, 4)
    np.testing.assert_array_equal(result("embed", np.array([[1]]), X[0]), X[0][None, 1:2])


@pytest.mark.parametrize("bad", [-1, 3])
def test_an_index_outside_is_refused(bad: int) -> None:
    for kind, attrs in (("take", {"axis": 0}), ("take_rows", {}), ("embed", {})):
        operands = [np.eye(3), np.array([0, bad])]
        with pytest.raises(InterpretError, match=f"leave an axis of 3 in\n.*{kind}"):
            result(kind, *(operands[::-1] if kind == "embed" else operands), **attrs)


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 2), (0, 1, 2), ()])
@pytest.mark.parametrize("keepdims", [True, False])
@pytest.mark.parametrize("kind", ["sum", "mean", "max"])
def test_reductions(kind: str, axes: tuple[int, ...], keepdims: bool) -> None:
    x = np.random.default_rng(3).normal(size=(3, 1, 5))
    kept = [a for a in range(3) if a not in axes]
    cells: dict[tuple[int, ...], list[float]] = {}
    for index in np.ndindex(*x.shape):
        cells.setdefault(tuple(index[a] for a in kept), []).append(float(x[index]))
    rule = {"sum": math.fsum, "mean": lambda v: math.fsum(v) / len(v), "max": max}[kind]
    expected = by_index(tuple(x.shape[a] for a in kept), lambda *i: rule(cells[i]))
    if keepdims:
        expected = expected.reshape([1 if a in axes else n for a, n in enumerate(x.shape)])
    got = result(kind, x, wide=True, axes=axes, keepdims=keepdims)
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-14)


def test_reductions_over_nothing_and_integers() -> None:
    assert result("sum", np.zeros((2, 0)), axes=(1,)).tolist() == [0, 0]
    assert result("sum", np.array([[100, 100]], np.int8), axes=(1,)).dtype == np.int8
    with pytest.raises(InterpretError, match="max"):
        result("max", np.zeros((2, 0)), axes=(1,))


def test_softmax_and_cumsum() -> None:
    x = np.array([[1.0, -2.0, 800.0], [-1e9, -math.inf, -1e9]])
    got = result("softmax", x, wide=True, axis=1)
    np.testing.assert_allclose(got, [[0, 0, 1], [0.5, 0, 0.5]], atol=1e-300)
    y = np.random.default_rng(4).normal(size=(3, 4))
    e = [[math.exp(v) for v in row] for row in y]
    totals = [math.fsum(e[i][j] for i in range(3)) for j in range(4)]
    np.testing.assert_allclose(
        result("softmax", y, wide=True, axis=0), by_index((3, 4), lambda i, j: e[i][j] / totals[j])
    )
    np.testing.assert_allclose(
        result("cumsum", y, wide=True, axis=1), by_index((3, 4), lambda i, j: math.fsum(y[i, : j + 1]))
    )
    assert result("softmax", np.zeros((2, 0)), axis=1).shape == (2, 0)


@pytest.mark.parametrize(
    ("groups", "padding", "bias", "dilation"),
    [(1, 0, False, 1), (2, 1, True, 1), (4, 2, True, 3), (1, 0, True, 2)],
)
def test_conv1d(groups: int, padding: int, bias: bool, dilation: int) -> None:
    rng = np.random.default_rng(5)
    x, w, b = rng.normal(size=(2, 4, 5)), rng.normal(size=(8, 4 // groups, 3)), rng.normal(size=8)

    def element(n: int, o: int, t: int) -> float:
        first = (o // (8 // groups)) * (4 // groups)
        terms = [
            w[o, c, j] * x[n, first + c, t + j * dilation - padding]
            for c in range(4 // groups) for j in range(3) if 0 <= t + j * dilation - padding < 5
        ]  # fmt: skip
        return math.fsum([*terms, b[o] if bias else 0.0])

    given = {"groups": groups, "padding": padding, "dilation": dilation}
    got = result("conv1d", x, w, b if bias else None, wide=True, **given)
    expected = by_index((2, 8, 5 + 2 * padding - 2 * dilation), element)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("kind", "operands", "attrs", "message"),
    [
        ("reshape", [X], {"shape": (5, 5)}, "has not as many elements"),
        ("reshape", [X], {"shape": (-1, 24)}, "-1 is not a size"),
        ("reshape", [X], {"shape": 24}, "must be a list of sizes"),
        ("transpose", [X], {"perm": (0, 0, 1)}, "not a permutation of 3 axes"),
        ("expand", [X], {"shape": (2, 3, 5)}, "do not broadcast"),
        ("expand", [X], {"shape": (3, 4)}, "does not broadcast to"),
        ("slice", [X], {"axis": 2, "start": 3, "stop": 1}, "3:1 is not inside an axis of 4"),
        ("slice", [X], {"axis": 2, "start": 0, "stop": 5}, "0:5 is not inside an axis of 4"),
        ("slice", [X], {"axis": 2, "start": -1, "stop": 4}, "-1 is not a size"),
        ("slice", [X], {"axis": 2, "start": 0, "stop": 4, "step": 0}, "step must be an integer from 1"),
        ("slice", [X], {"axis": 3, "start": 0, "stop": 4}, "axis 3 is not in 0..2"),
        ("slice", [X], {"axis": True, "start": 0, "stop": 2}, "axis True"),
        ("concat", [X, X[0]], {"axis": 2}, "differ outside axis 2"),
        ("concat", [X, X[:, :2]], {"axis": 2}, "differ outside axis 2"),
        ("concat", [X[0, 0], X[0]], {"axis": 0}, "differ outside"),
        ("concat", [], {"axis": 0}, "operand 0 must be a tensor"),
        ("split", [X], {"axis": 1, "sizes": (1, 1)}, "do not add up to 3"),
        ("split", [np.zeros(0)], {"axis": 0, "sizes": ()}, "do not add up to 0"),
        ("full", [], {"shape": (1,), "value": 0.5, "dtype": "i32"}, "0.5 does not fit the type i32"),
        ("iota", [], {"size": 3, "dtype": "bool"}, "makes numbers, not bool"),
        ("iota", [], {"size": 1.5}, "1.5 is not a size"),
        ("take", [X, X], {"axis": 0}, "indices must be integers"),
        ("take_rows", [np.array(1.0), np.array([0])], {}, "takes x"),
        ("sum", [X], {"axes": (1, 1)}, "holds an axis twice"),
        ("sum", [X], {"axes": (0,), "keepdims": 1}, "keepdims must be true or false"),
        ("mean", [np.ones(2, np.int32)], {"axes": (0,)}, "needs float operands"),
        ("sum", [np.ones(2, bool)], {"axes": (0,)}, "does not add bool"),
        ("conv1d", [X, X], {"groups": 0}, "groups must be an integer from 1"),
        ("conv1d", [X, np.ones((2, 3, 5))], {}, "is longer than 4"),
        ("conv1d", [X, np.ones((2, 3, 2))], {"dilation": 4}, "of 2 at dilation 4 is longer than 4"),
        ("conv1d", [X, np.ones((2, 3, 2))], {"dilation": 0}, "dilation must be an integer from 1"),
        ("conv1d", [X, np.ones((2, 3, 2)), np.ones(3)], {}, r"bias \[3\] is not \[2\]"),
    ],
)  # fmt: skip
def test_what_does_not_fit(kind: str, operands: list[Any], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferError, match=f"^{kind}: .*{message}"):
        result(kind, *operands, **attrs)
