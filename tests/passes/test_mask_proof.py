"""The mask proof: what is recognised, kept as it is, or refused; and random masks against brute force."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.dims import FloorDiv, Table, symbol
from ir.predicates import CAUSAL, KEY, QUERY, evaluate_grid, is_causal, window
from ir.text.expressions import expression
from passes.attention.proof import MaskRefused, chunk, prove

And, Or, Not, Mod = sympy.And, sympy.Or, sympy.Not, sympy.Mod
q, k = QUERY, KEY

FORMS: dict[str, tuple[Any, str]] = {
    "causal": (k <= q, "k <= q"),
    "the other way round": (q >= k, "k <= q"),
    "strictly before the next": (k < q + 1, "k <= q"),
    "not after": (Not(k > q), "k <= q"),
    "difference": (q - k >= 0, "k <= q"),
    "scaled": (3 * k <= 3 * q, "k <= q"),
    "window": (And(k <= q, q - k < 8), "((q - k) < 8) & (k <= q)"),
    "window from the key's side": (And(k <= q, k > q - 8), "((q - k) < 8) & (k <= q)"),
    "window, at most": (And(k <= q, q - k <= 7), "((q - k) < 8) & (k <= q)"),
    "smaller of two windows": (And(k <= q, q - k < 8, k > q - 5), "((q - k) < 5) & (k <= q)"),
    "window as wide as the context": (And(k <= q, q - k < 64), "k <= q"),
    "window one below the context": (And(k <= q, q - k < 63), "((q - k) < 63) & (k <= q)"),
    "chunk": (And(k <= q, sympy.Eq(FloorDiv(q, 8), FloorDiv(k, 8))), "((k//8) == (q//8)) & (k <= q)"),
    "chunk by its start": (And(k <= q, k >= 8 * FloorDiv(q, 8)), "((k//8) == (q//8)) & (k <= q)"),
    "chunk of the context": (And(k <= q, sympy.Eq(FloorDiv(q, 64), FloorDiv(k, 64))), "k <= q"),
    "shared by both choices": (
        Or(And(k <= q, q - k < 8), And(k <= q, k < 4)),
        "(((q - k) < 8) | (k < 4)) & (k <= q)",
    ),
    "strictly below or equal": (Or(k < q, sympy.Eq(k, q)), "k <= q"),
    "a term that hides nothing": (And(k <= q, k + q >= 0, k <= 2 * q), "k <= q"),
}


@pytest.mark.parametrize("name", FORMS)
def test_recognises(name: str) -> None:
    predicate, expected = FORMS[name]
    assert expression(prove(predicate, 64)) == expected


REFUSED: dict[str, tuple[Any, str]] = {
    "everything": (sympy.true, "the query at position 0 sees the key at 1"),
    "nothing": (sympy.false, "shows the query at position 0 no key"),
    "one ahead": (k <= q + 1, "the query at position 0 sees the key at 1"),
    "window without causal": (q - k < 8, "looks ahead"),
    "strictly before": (k < q, "shows the query at position 0 no key"),
    "a static prefix": (Or(k <= q, k < 4), "the query at position 0 sees the key at 1"),
    "one pair, far away": (
        Or(k <= q, And(sympy.Eq(q, 40), sympy.Eq(k, 63))),
        "at position 40 sees the key at 63",
    ),
    "chunks both ways": (sympy.Eq(FloorDiv(q, 8), FloorDiv(k, 8)), "looks ahead"),
    "an empty row, far away": (And(k <= q, sympy.Ne(q, 50)), "the query at position 50 no key"),
    "by head": (And(k <= q, q - k < symbol("h") + 4), "differs from head to head"),
    "by length": (And(k <= q, 2 * k < symbol("S")), "depends on S"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses(name: str) -> None:
    predicate, reason = REFUSED[name]
    with pytest.raises(MaskRefused, match=reason):
        prove(predicate, 64)


def test_a_window_of_4096_is_no_causal_mask_and_its_last_position_is_tried() -> None:
    """On small sizes it looks causal; and a look-ahead that starts at 4,097 is found."""
    assert prove(And(k <= q, q - k < 4096), 4097) == And(CAUSAL, window(4096))
    assert prove(And(k <= q, q - k < 4096), 4096) == CAUSAL
    late = Or(k <= q, And(q >= 4096, k <= q + 1))
    assert prove(late, 4097) == CAUSAL
    with pytest.raises(MaskRefused, match="position 4096 sees the key at 4097"):
        prove(late, 4098)


def test_long_contexts_take_a_symbolic_argument_or_are_refused() -> None:
    striped = Or(sympy.Ne(Mod(k, 3), 0), sympy.Eq(k, q))
    assert prove(And(k <= q, q - k < 4096), 1 << 20) == And(CAUSAL, window(4096))
    assert prove(And(k <= q, striped), 1 << 20) == And(CAUSAL, striped)
    for predicate in (3 * k <= 3 * q, And(k <= q, sympy.Ne(Mod(k, 3), 0))):
        with pytest.raises(MaskRefused, match="--max-context"):
            prove(predicate, 1 << 20)
    with pytest.raises(MaskRefused, match="unbounded"):
        prove(And(k <= q, striped), None)
    assert prove(And(k <= q, q - k < 8), None) == And(CAUSAL, window(8))


def test_tables_are_recognised_kept_or_refused() -> None:
    lower = np.tril(np.ones((64, 64), bool))
    read = Table(0, q, k)
    assert prove(read, 64, [lower]) == CAUSAL
    assert prove(read, 64, [lower & ~np.tril(lower, -8)]) == And(CAUSAL, window(8))
    assert prove(read, 64, [lower & np.kron(np.eye(8, dtype=bool), np.ones((8, 8), bool))]) == And(
        CAUSAL, chunk(8)
    )
    holes = lower & (np.random.default_rng(0).random((64, 64)) < 0.5) | np.eye(64, dtype=bool)
    assert prove(read, 64, [holes]) == And(CAUSAL, read)
    assert (
        prove(read, 5, [lower | (np.arange(64) >= 5)]) == CAUSAL
    )  # what lies above the context does not matter
    half = Table(0, FloorDiv(q, 2), k)  # hides nothing but what is later
    assert prove(And(k <= q, Not(And(Not(half), k < 0))), 64, [np.ones((32, 64), bool)]) == CAUSAL
    with pytest.raises(MaskRefused, match="position 3 sees the key at 9"):
        prove(read, 64, [holes | (np.arange(64)[:, None] == 3) & (np.arange(64) == 9)])
    with pytest.raises(MaskRefused, match="table of 64 positions, and the context is 65.*--max-context 64"):
        prove(And(k <= q, read), 65, [lower])
    with pytest.raises(MaskRefused, match="outside it"):
        prove(And(k <= q, Table(0, 0, q - k)), 64, [np.ones((1, 64), bool)])


numbers = st.integers(0, 9)
terms = st.deferred(
    lambda: (
        st.sampled_from([q, k])
        | numbers.map(sympy.Integer)
        | st.tuples(terms, terms).map(lambda t: t[0] + t[1])
        | st.tuples(terms, numbers).map(lambda t: t[0] * t[1])
        | st.tuples(terms, st.integers(1, 9)).map(lambda t: FloorDiv(*t))
        | st.tuples(terms, st.integers(1, 9)).map(lambda t: Mod(*t))
        | st.tuples(terms, numbers).map(lambda t: t[0] - t[1])
    )
)
COMPARISONS = [sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt, sympy.Eq, sympy.Ne]
atoms = st.sampled_from([CAUSAL, k < q, sympy.Eq(k, q)]) | st.tuples(
    st.sampled_from(COMPARISONS), terms, terms
).map(lambda t: t[0](t[1], t[2]))
predicates = st.recursive(
    atoms,
    lambda inner: (
        st.tuples(inner, inner).map(lambda t: And(*t))
        | st.tuples(inner, inner).map(lambda t: Or(*t))
        | inner.map(Not)
    ),
    max_leaves=5,
)


def grid(predicate: Any, size: int) -> np.ndarray[Any, Any]:
    line = np.arange(size)
    return np.broadcast_to(evaluate_grid(predicate, line[:, None], line[None, :]), (size, size))


def check(predicate: Any, context: int) -> None:
    """Refused exactly where brute force finds a later key or an empty row; else it says the same."""
    seen = grid(predicate, context)
    sound = not np.triu(seen, 1).any() and seen.any(axis=1).all()
    try:
        proved = prove(predicate, context)
    except MaskRefused:
        assert not sound
        return
    assert sound and is_causal(proved)
    assert np.array_equal(grid(proved, context), seen)


@settings(max_examples=150, deadline=None)
@given(predicates, st.integers(1, 40))
def test_any_mask_is_refused_or_kept_as_it_is(predicate: Any, context: int) -> None:
    check(predicate, context)


@settings(max_examples=150, deadline=None)
@given(predicates, st.integers(1, 40))
def test_masks_that_never_look_ahead_are_kept_as_they_are(predicate: Any, context: int) -> None:
    check(And(CAUSAL, Or(predicate, sympy.Eq(q, k))), context)
    prove(And(CAUSAL, Or(predicate, sympy.Eq(q, k))), context)  # not refused
