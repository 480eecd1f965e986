"""Symbolic sizes: division, evaluation and bounds, against integer arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.dims import CeilDiv, FloorDiv, evaluate, free_names, normalize, product, symbol, upper_bound
from tests.ir.strategies import integers_over

T, R = symbol("T"), symbol("R")


@given(st.integers(-100, 100), st.integers(1, 20))
def test_divisions_of_integers_round_down_and_up(a: int, b: int) -> None:
    assert FloorDiv(a, b) == a // b
    assert CeilDiv(a, b) == (a + b - 1) // b


@given(st.integers(1, 1000), st.integers(1, 64))
def test_ceiling_is_the_floor_of_the_padded(n: int, b: int) -> None:
    values = {"T": n}
    assert evaluate(CeilDiv(T, b), values) == evaluate(FloorDiv(T + b - 1, b), values) == -(-n // b)


def test_division_by_one_and_by_itself() -> None:
    assert FloorDiv(T, 1) == CeilDiv(T, 1) == T
    assert evaluate(FloorDiv(T, T), {"T": 7}) == 1


def test_evaluate_names_the_symbol_that_is_not_bound() -> None:
    with pytest.raises(KeyError, match="R"):
        evaluate(T + R, {"T": 1})


def test_symbols_are_equal_by_name_and_found() -> None:
    assert symbol("T") is not None and symbol("T") == T != R
    assert free_names(FloorDiv(T + 1, 2) * R) == {"T", "R"} and free_names(3) == set()
    assert T.is_positive and symbol("q").is_nonnegative and not symbol("q").is_positive


def test_normalize_gives_ints_and_products_multiplied_out() -> None:
    assert type(normalize(T - T + 3)) is int and normalize(T * (R + 2)) == T * R + 2 * T
    assert product(()) == 1 and product((2, T, 3)) == 6 * T and product((2, 3)) == 6
    with pytest.raises(TypeError):
        normalize("T")


@pytest.mark.parametrize(
    ("size", "high"),
    [
        (T, 64),
        (2 * T + 1, 129),
        (T - 1, 63),
        (5 - T, 4),
        (CeilDiv(T, 16), 4),
        (CeilDiv(T + 1, 16), 5),
        (FloorDiv(CeilDiv(T, 3) + 1, 2), 11),
        (16 * CeilDiv(T * R, 16), 512),
        (T % 16, 15),
        (T * T, 4096),
        (FloorDiv(T, R), 64),
        (7, 7),
        (symbol("N"), None),
        (FloorDiv(1, symbol("N")), 1),
        (5 - symbol("N"), 4),
    ],
)
def test_upper_bounds(size: Any, high: int | None) -> None:
    assert upper_bound(size, {"T": (1, 64), "R": (1, 8), "N": (1, None)}) == high


def test_a_symbol_without_bounds_has_no_upper_bound() -> None:
    with pytest.raises(KeyError, match="X"):
        upper_bound(symbol("X"), {})


@settings(max_examples=60, deadline=None)
@given(integers_over(("T", "R")), st.integers(1, 9), st.integers(1, 5))
def test_no_value_is_above_the_bound(size: Any, t: int, r: int) -> None:
    bound = upper_bound(size, {"T": (1, 9), "R": (1, 5)})
    assert bound is not None and evaluate(size, {"T": t, "R": r}) <= bound
