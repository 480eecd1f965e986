"""topk against sorting in Python and torch.topk; take_along against loops over indices."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from ir.interpret import InterpretError
from ir.ops import InferError
from tests.ir.run import result, results

DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.int8, np.uint8]


def by_sorting(row: list[Any], k: int) -> list[int]:
    """Python's sort is stable, so equal ones stay in order; a NaN goes first."""
    nan_first = sorted(range(len(row)), key=lambda i: (row[i] == row[i], -row[i] if row[i] == row[i] else 0))
    return nan_first[:k]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size", "k"), [(1, 1, 1), (3, 5, 5), (16, 17, 4), (7, 131, 8), (0, 4, 2)])
def test_topk_with_ties(dtype: Any, rows: int, size: int, k: int) -> None:
    """Few different numbers, so that nearly every row has ties, at the border of the k too."""
    x = np.random.default_rng(size).integers(0, 5, (rows, size)).astype(dtype)
    values, indices = results("topk", x, k=k)
    expected = np.array([by_sorting(row, k) for row in x.tolist()], np.int32).reshape(rows, k)
    assert indices.dtype == np.int32 and values.dtype == dtype
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(values, np.take_along_axis(x, expected, -1))


@pytest.mark.parametrize("shape", [(4,), (2, 3, 16), (5, 61)])
def test_topk_as_torch_where_nothing_is_equal(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    x[..., 1], x[..., 3] = -math.inf, math.inf
    values, indices = results("topk", x, k=3)
    expected = torch.topk(torch.from_numpy(x), 3)
    np.testing.assert_array_equal(values, expected.values.numpy())
    np.testing.assert_array_equal(indices, expected.indices.numpy())


def test_nan_is_the_largest_and_zeros_are_equal() -> None:
    x = np.array([1.0, math.nan, -0.0, 0.0, math.inf, -math.nan], np.float32)
    values, indices = results("topk", x, k=6)
    assert indices.tolist() == [1, 5, 4, 0, 2, 3]
    assert np.isnan(values[:2]).all() and np.signbit(values[4]) and not np.signbit(values[5])
    least = np.array([-128, 127, -128, 0], np.int8)
    assert results("topk", least, k=3)[1].tolist() == [1, 3, 0]


def test_take_along() -> None:
    rng = np.random.default_rng(2)
    x, indices = rng.normal(size=(3, 2, 7)), rng.integers(0, 7, (3, 2, 9)).astype(np.int32)
    found = result("take_along", x, indices)
    assert found.shape == (3, 2, 9)
    for i, j, n in np.ndindex(3, 2, 9):
        assert found[i, j, n] == x[i, j, indices[i, j, n]]
    assert result("take_along", np.array([5, 6]), np.array([1], np.int32)).tolist() == [6]


@pytest.mark.parametrize("bad", [-1, 3])
def test_an_index_outside_is_an_error(bad: int) -> None:
    with pytest.raises(InterpretError, match="leave an axis of 3"):
        result("take_along", np.ones((2, 3)), np.array([[0], [bad]], np.int32))


@pytest.mark.parametrize(
    ("kind", "operands", "attrs", "message"),
    [
        ("topk", [np.ones(3)], {"k": 4}, r"not 4 elements along the last axis of \[3\]"),
        ("topk", [np.ones(3)], {"k": 0}, "k must be an integer from 1"),
        ("topk", [np.array(1.0)], {"k": 1}, "last axis"),
        ("topk", [np.ones(3, np.bool_)], {"k": 1}, "needs numbers, not bool"),
        ("take_along", [np.ones((2, 3)), np.ones((2, 1))], {}, "must be integers"),
        ("take_along", [np.ones((2, 3)), np.ones((3, 1), np.int32)], {}, "differ before their last axis"),
        ("take_along", [np.ones((2, 3)), np.ones(2, np.int32)], {}, "differ before their last axis"),
    ],
)
def test_what_does_not_fit(kind: str, operands: list[Any], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferError, match=f"^{kind}: .*{message}"):
        results(kind, *operands, **attrs)
