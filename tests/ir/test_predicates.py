"""Mask predicates: what is recognised, and their values against plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from sympy.logic.boolalg import And, Not, Or

from ir.dims import CeilDiv, FloorDiv, Table, symbol
from ir.predicates import CAUSAL, KEY, QUERY, conjuncts, evaluate_grid, is_causal, why_not, window, window_of
from tests.ir.strategies import predicates

q, k = QUERY, KEY
TABLES = [np.random.default_rng(i).random((9, 9)) < 0.5 for i in range(3)]


def plain(e: Any, values: dict[Any, int]) -> Any:
    """The value of an expression at one point, by Python's own integers."""
    if isinstance(e, sympy.Symbol):
        return values[e]
    if not e.args:
        return bool(e) if e in (sympy.true, sympy.false) else int(e)
    args = [plain(a, values) for a in e.args]
    rules = {
        And: all,
        Or: any,
        Not: lambda a: not a[0],
        sympy.Add: sum,
        sympy.Min: min,
        sympy.Max: max,
        FloorDiv: lambda a: a[0] // a[1],
        CeilDiv: lambda a: -(-a[0] // a[1]),
        sympy.Mod: lambda a: a[0] % a[1],
        sympy.Le: lambda a: a[0] <= a[1],
        sympy.Lt: lambda a: a[0] < a[1],
        sympy.Ge: lambda a: a[0] >= a[1],
        sympy.Gt: lambda a: a[0] > a[1],
        sympy.Eq: lambda a: a[0] == a[1],
        sympy.Ne: lambda a: a[0] != a[1],
        sympy.Mul: lambda a: int(np.prod(a, dtype=object)),
        Table: lambda a: bool(TABLES[a[0]][a[1], a[2]]),
    }
    return next(rule(args) for kind, rule in rules.items() if isinstance(e, kind))


def grid(predicate: Any, size: int = 6, tables: Any = ()) -> Any:
    positions = np.arange(size)
    return np.broadcast_to(
        evaluate_grid(predicate, positions[:, None], positions[None], tables), (size, size)
    )


@settings(max_examples=50, deadline=None)
@given(predicates(tables=False))
def test_a_grid_is_what_python_computes_point_by_point(predicate: Any) -> None:
    if predicate.has(sympy.Pow):
        return
    expected = [[plain(predicate, {q: i, k: j}) for j in range(6)] for i in range(6)]
    np.testing.assert_array_equal(grid(predicate), expected)


def test_tables_are_read_by_number_row_and_column() -> None:
    found = grid(CAUSAL & ~Table(1, FloorDiv(q, 2), k), 6, TABLES)
    expected = [[j <= i and not TABLES[1][i // 2, j] for j in range(6)] for i in range(6)]
    np.testing.assert_array_equal(found, expected)


def test_a_table_is_not_read_outside() -> None:
    with pytest.raises(IndexError, match="negative"):
        grid(Table(0, q - 1, k), 6, TABLES)
    with pytest.raises(IndexError):
        grid(Table(0, q, k), 10, TABLES)


def test_constants_fill_the_grid() -> None:
    assert grid(sympy.true).all() and not grid(sympy.false).any() and grid(True).shape == (6, 6)


@pytest.mark.parametrize(
    "predicate",
    [
        k <= q,
        q >= k,
        k - q <= 0,
        0 <= q - k,
        k < q + 1,
        q + 1 > k,
        ~(k > q),
        ~(q < k),
        -k >= -q,
        2 + k <= q + 2,
    ],
)
def test_causal_in_every_form(predicate: Any) -> None:
    assert is_causal(predicate) and is_causal(predicate & window(3)) and not is_causal(predicate | (k < 3))
    np.testing.assert_array_equal(grid(predicate), np.tril(np.ones((6, 6), bool)))


@pytest.mark.parametrize(
    "predicate", [k < q, k <= q + 1, k >= q, sympy.Eq(k, q), q - k < 8, sympy.true, 2 * k <= q, k <= 5]
)
def test_what_is_not_exactly_causal_is_not_taken_for_it(predicate: Any) -> None:
    assert not is_causal(predicate)
    assert (grid(predicate) != np.tril(np.ones((6, 6), bool))).any()


@pytest.mark.parametrize(
    "predicate",
    [
        q - k < 4,
        k - q > -4,
        q - k <= 3,
        k > q - 4,
        k >= q - 3,
        q < k + 4,
        ~(q - k >= 4),
        4 > q - k,
        q <= k + 3,
    ],
)
def test_a_window_in_every_form(predicate: Any) -> None:
    assert window_of(predicate) == window_of(predicate & CAUSAL) == 4
    assert window_of(predicate & window(9)) == 4
    assert window_of(predicate | CAUSAL) is None


def test_what_has_no_window() -> None:
    assert (
        window_of(CAUSAL) is None and window_of(k > 4) is None and window_of(FloorDiv(q - k, 2) < 4) is None
    )


def test_conjuncts() -> None:
    assert set(conjuncts(CAUSAL & window(4))) == {CAUSAL, window(4)} and conjuncts(CAUSAL) == (CAUSAL,)


@pytest.mark.parametrize(
    ("predicate", "reason"),
    [
        (symbol("T") > q, "T is not an integer expression over q and k"),
        (Table(1, q, k), "there are 1"),
        (q + k, "not a mask predicate"),
        ("k <= q", "not a mask predicate"),
        (CAUSAL & (sympy.sqrt(q) < k), "is not an integer expression"),
        (3, "not a mask predicate"),
    ],
)
def test_what_is_no_predicate_says_why(predicate: Any, reason: str) -> None:
    assert reason in str(why_not(predicate, 1))


def test_what_is_a_predicate() -> None:
    for predicate in (CAUSAL & window(4), Table(0, q, k) | ~Table(0, k, q), True, sympy.false):
        assert why_not(predicate, 1) is None


def test_an_unknown_symbol_has_no_value() -> None:
    with pytest.raises(ValueError, match="neither q nor k"):
        grid(symbol("T") > q)
