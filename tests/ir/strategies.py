"""Random sizes, predicates and graphs for property tests."""

from __future__ import annotations

from typing import Any

import sympy
from hypothesis import strategies as st

from ir.dims import CeilDiv, FloorDiv, Table, symbol
from ir.graph import Graph, Op, Scalar, Value, Weight
from ir.types import KV, DType, Stream, Tensor

SYMBOLS = ("T", "R", "M0", "S")
SMALL = st.integers(1, 20)

identifiers = st.from_regex(r"[a-z_][a-z0-9_]{0,6}", fullmatch=True).filter(lambda s: s not in {"nan", "inf"})
odd_text = st.text(max_size=12)


def integers_over(names: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Integer expressions with divisions by positive constants."""
    leaves = st.sampled_from([symbol(n) for n in names]) | st.integers(-20, 20).map(sympy.Integer)
    divided = (FloorDiv, CeilDiv, sympy.Mod)

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        pair = st.tuples(inner, inner)
        return st.one_of(
            pair.map(lambda p: p[0] + p[1]),
            pair.map(lambda p: p[0] - p[1]),
            pair.map(lambda p: p[0] * p[1]),
            pair.map(lambda p: sympy.Min(*p)),
            pair.map(lambda p: sympy.Max(*p)),
            st.tuples(st.sampled_from(divided), inner, SMALL).map(lambda t: t[0](t[1], sympy.Integer(t[2]))),
        )

    return st.recursive(leaves, grow, max_leaves=6)


def predicates(tables: bool = True) -> st.SearchStrategy[Any]:
    """Conditions over the positions q and k."""
    number = integers_over(("q", "k"))
    compare = st.sampled_from([sympy.Le, sympy.Lt, sympy.Ge, sympy.Gt, sympy.Eq, sympy.Ne])
    leaves = st.tuples(compare, number, number).map(lambda t: t[0](t[1], t[2]))
    if tables:
        entry = st.tuples(st.integers(0, 2), number, number)
        leaves = leaves | entry.map(lambda t: Table(sympy.Integer(t[0]), t[1], t[2]))

    def grow(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        several = st.lists(inner, min_size=2, max_size=3)
        return st.one_of(
            several.map(lambda p: sympy.And(*p)), several.map(lambda p: sympy.Or(*p)), inner.map(sympy.Not)
        )

    return st.recursive(leaves, grow, max_leaves=4)


sizes = (
    st.integers(0, 100)
    | st.sampled_from([symbol(n) for n in SYMBOLS])
    | integers_over(SYMBOLS).filter(lambda e: not e.is_negative)
)
tensors = st.builds(Tensor, st.sampled_from(DType), st.lists(sizes, max_size=3).map(tuple))
streams = st.builds(Stream, identifiers, st.sampled_from(DType), SMALL, SMALL)
states = st.builds(KV, st.lists(streams, max_size=3).map(tuple), SMALL, SMALL, st.none() | SMALL)
numbers = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False)
attributes = st.recursive(
    numbers | odd_text | predicates() | integers_over(SYMBOLS),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs that the text can hold, whatever their types."""
    names = iter(draw(st.lists(odd_text | identifiers, min_size=16, max_size=16, unique=True)))
    types = tensors | states
    inputs = [Value(next(names), draw(types)) for _ in range(draw(st.integers(0, 3)))]
    values, ops = list(inputs), []
    for _ in range(draw(st.integers(0, 4))):
        operand = st.none() | st.builds(Scalar, numbers | st.just(float("nan")))
        operand = operand | st.builds(Weight, odd_text, types)
        if values:
            operand = operand | st.sampled_from(values)
        outs = tuple(Value(next(names), draw(types)) for _ in range(draw(st.integers(1, 2))))
        args = tuple(draw(st.lists(operand, max_size=4)))
        attrs = draw(st.dictionaries(identifiers, attributes, max_size=3))
        ops.append(Op(draw(identifiers), args, attrs, outs, draw(odd_text)))
        values.extend(outs)
    bounds = st.tuples(st.integers(0, 9), st.none() | st.integers(10, 10**9))
    dims = {name: draw(bounds) for name in SYMBOLS[: draw(st.integers(0, 4))]}
    outputs = tuple(draw(st.lists(st.sampled_from(values), max_size=3))) if values else ()
    arena = tuple(draw(st.lists(sizes, max_size=3)))
    return Graph(draw(odd_text), dims, tuple(inputs), tuple(ops), outputs, arena)
