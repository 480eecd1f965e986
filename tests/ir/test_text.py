"""The text form: what is printed parses back to the same graph, and prints as the same text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import HealthCheck, example, given, settings

from ir.dims import CeilDiv, FloorDiv, Table, symbol
from ir.graph import Graph, Op, Scalar, Value
from ir.predicates import CAUSAL, KEY, QUERY, window
from ir.text import parse, print_attr, print_graph
from ir.types import DType, Tensor
from ir.verify import verify
from tests.ir.strategies import graphs, integers_over, predicates

T, R = symbol("T"), symbol("R")
GOLDEN = Path(__file__).parent.parent / "data" / "ir" / "every_construct.ir"


def reparsed(value: Any) -> Any:
    """An attribute, printed and parsed."""
    return parse(print_graph(with_attr(value))).ops[0].attrs["a"]


def with_attr(value: Any) -> Graph:
    out = Value("x", Tensor(DType.F32, ()))
    return Graph("g", {}, (), (Op("f", (), {"a": value}, (out,)),), ())


def test_every_construct_prints_as_it_was_written() -> None:
    text = GOLDEN.read_text()
    graph = parse(text)
    assert print_graph(graph).splitlines() == text.splitlines()
    assert parse(print_graph(graph)) == graph


def test_every_construct_is_read_as_meant() -> None:
    graph = parse(GOLDEN.read_text())
    ops = {op.outs[0].name: op for op in graph.ops}
    assert graph.dims == {"T": (1, 8192), "R": (1, 64), "M0": (1, None)}
    assert graph.arena == (4 * T, 16 * CeilDiv(T, 16) + 64, sympy.Max(64, FloorDiv(T, 16)))
    assert ops["n"].loc == "model.layers.0.norm" and ops["n"].attrs == {"eps": 1e-05, "group": 0, "at": (0,)}
    assert ops["m"].loc == 'odd "loc" \\ é { // }' and ops["m"].args[1] is None
    assert ops["w"].args[0].name == 'model.layers.0/q proj "x"'  # type: ignore[union-attr]
    assert ops["p"].args[1] == Scalar(-0.0) != Scalar(0.0)
    assert ops["far"].args[:2] == (Scalar(True), Scalar(float("-inf")))
    assert ops["i"].attrs["dtype"] == DType.I64 and ops["i"].attrs["size"] == 2 * T + 1
    assert ops["o"].attrs["mask"] == sympy.Or(Table(0, FloorDiv(KEY, 8), FloorDiv(QUERY, 8)), CAUSAL)
    assert graph.inputs[2].type.window == 8  # type: ignore[union-attr]
    assert graph.inputs[-1].name == "a name"


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(graphs())
def test_a_graph_survives_its_text(graph: Graph) -> None:
    text = print_graph(graph)
    assert parse(text) == graph
    assert print_graph(parse(text)) == text


@settings(max_examples=60, deadline=None)
@given(integers_over(("T", "R", "q", "k")))
def test_an_expression_survives_its_text(expr: Any) -> None:
    op = with_attr(expr).ops[0]
    assert reparsed(expr) == op.attrs["a"]


@settings(max_examples=60, deadline=None)
@given(predicates())
@example(2 * ((QUERY - KEY) * CeilDiv(KEY, 11)) <= -2)  # sympy keeps the 2 outside, and puts it into the sum
@example(Table(0, 2 * ((QUERY - KEY) * CeilDiv(KEY, 11)), KEY))  # where the text multiplies from the left
@example(~(Table(2, QUERY, 0) & (2 * ((QUERY - KEY) * CeilDiv(KEY, 11)) <= -2)))
def test_a_predicate_survives_its_text(predicate: Any) -> None:
    assert reparsed(predicate) == with_attr(predicate).ops[0].attrs["a"]


@pytest.mark.parametrize(
    ("expr", "text"),
    [
        (FloorDiv(T + 15, 16), "(T + 15)//16"),
        (CeilDiv(T, 16), "ceildiv(T, 16)"),
        (T - 1, "T - 1"),
        (1 - T, "1 - T"),
        (-T, "-T"),
        (-2 * T, "-2*T"),
        (T * T, "T*T"),
        (T * (R + 1), "R*T + T"),
        (CAUSAL, "k <= q"),
        (CAUSAL & window(8), "((q - k) < 8) & (k <= q)"),
        (~Table(0, QUERY, KEY), "~(Table(0, q, k))"),
        (sympy.Eq(FloorDiv(KEY, 8), FloorDiv(QUERY, 8)), "(k//8) == (q//8)"),
        ((1.5, True, "a\n", DType.F16), '[1.5, true, "a\\n", "f16"]'),
        (np.float32(0.5), "0.5"),
        (np.int64(3), "3"),
        (sympy.true, "true"),
    ],
)
def test_attributes_print_like(expr: Any, text: str) -> None:
    assert print_attr(with_attr(expr).ops[0].attrs["a"]) == text
    assert print_attr(reparsed(expr)) == text


def test_division_may_have_spaces_around_it() -> None:
    op = "%y = neg %x {a=(k // 8) == (q // 8)} : f32[T // 2] // a // b"
    text = f"graph @g(%x: f32[T // 2]) {{\n  {op}\n  return\n}}"
    found = parse(text).ops[0]
    assert found.out.type.shape == (FloorDiv(T, 2),) and found.loc == "a // b"  # type: ignore[union-attr]
    assert found.attrs["a"] == sympy.Eq(FloorDiv(KEY, 8), FloorDiv(QUERY, 8))


def test_equal_sizes_are_equal_however_they_were_built() -> None:
    assert Tensor(DType.F32, (8 * (T + 1),)) == Tensor(DType.F32, (8 * T + 8,))
    assert Tensor(DType.F32, (T * (T + 1),)) == Tensor(DType.F32, (T * T + T,))
    assert Tensor(DType.F32, (sympy.Integer(3), np.int64(4))) == Tensor(DType.F32, (3, 4))  # type: ignore[arg-type]


def test_equal_sums_in_conditions_are_equal_however_they_were_built() -> None:
    outside, inside = 2 * ((QUERY - KEY) * FloorDiv(KEY, 8)), 2 * (QUERY - KEY) * FloorDiv(KEY, 8)
    assert outside != inside
    assert with_attr(~(CAUSAL & (outside < 1))) == with_attr(~(CAUSAL & (inside < 1)))
    assert with_attr(Table(0, outside, KEY)) == with_attr(Table(0, inside, KEY))
    assert with_attr(sympy.Eq(outside, inside)).ops[0].attrs["a"] is True


def test_an_attribute_without_value_is_left_out() -> None:
    assert "a" not in with_attr(None).ops[0].attrs


def test_a_valid_graph_stays_valid() -> None:
    text = "graph @g(%x: f32[T,4]) dims {T: 1..} {\n  %y = mul %x, 2 : f32[T,4]\n  return %y\n}"
    verify(parse(print_graph(parse(text))))
