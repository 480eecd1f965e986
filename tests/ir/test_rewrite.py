"""Rewriting: names stay, misses have reasons, rules see earlier rewrites, what never settles is an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.graph import Graph, Op, Scalar, Weight
from ir.interpret import interpret
from ir.rewrite import Miss, Rule, View, count_uses, rewrite
from ir.text import parse, print_graph
from ir.types import DType, Tensor
from ir.verify import verify


def graph_of(*ops: str, result: str) -> Graph:
    body = "\n".join(f"  {op}" for op in ops)
    graph = parse(f"graph @g(%x: f32[4]) {{\n{body}\n  return {result}\n}}")
    verify(graph)
    return graph


def lines(graph: Graph) -> list[str]:
    verify(graph)
    return [line.strip() for line in print_graph(graph).splitlines()[1:-1]]


def neg_of_neg(op: Op, view: View) -> Any:
    inner = view.made_by(op.args[0], "neg")
    return None if inner is None else inner.args[0]


def square(op: Op, view: View) -> Any:
    """pow x, 2 -> mul x, x; a near miss elsewhere."""
    if op.args[1] != Scalar(2):
        return Miss("square", op, f"the exponent is {op.args[1]}")
    return view.op("mul", op.args[0], op.args[0])


NEG = Rule("neg_of_neg", ("neg",), neg_of_neg)
SQUARE = Rule("square", ("pow",), square)


def test_a_replacement_keeps_the_name_and_the_loc() -> None:
    graph = graph_of("%y = pow %x, 2 : f32[4] // model.a", "%z = neg %y : f32[4]", result="%z")
    done = rewrite(graph, [SQUARE])
    assert [" ".join(line.split()) for line in lines(done.graph)] == [
        "%y = mul %x, %x : f32[4] // model.a", "%z = neg %y : f32[4]", "return %z",
    ]  # fmt: skip
    assert done.counts == {"square": 1} and done.count == 1 and done.misses == ()


def test_an_existing_value_takes_the_place_of_the_result() -> None:
    ops = ("%a = neg %x : f32[4]", "%b = neg %a : f32[4]", "%c = neg %b : f32[4]", "%d = exp %c : f32[4]")
    done = rewrite(graph_of(*ops, result="%d, %b"), [NEG])
    assert lines(done.graph)[-3:] == ["%c = neg %x : f32[4]", "%d = exp %c : f32[4]", "return %d, %x"]
    x = np.arange(4, dtype=np.float32)
    before = interpret(graph_of(*ops, result="%d, %b"), {"x": x}, {}).outputs
    after = interpret(done.graph, {"x": x}, {}).outputs
    np.testing.assert_array_equal(before, after)


def test_a_miss_says_where_and_why_and_leaves_the_graph() -> None:
    graph = graph_of("%y = pow %x, 3 : f32[4] // model.a", result="%y")
    done = rewrite(graph, [SQUARE])
    assert done.graph == graph and done.count == 0
    assert [str(m) for m in done.misses] == ["square: %y = pow (model.a): the exponent is Scalar(value=3)"]


@pytest.mark.parametrize("given_up", [None, "miss"])
def test_a_rule_that_gives_up_leaves_no_ops(given_up: str | None) -> None:
    def tries(op: Op, view: View) -> Any:
        view.op("exp", op.args[0])
        return None if given_up is None else Miss("tries", op, "no")

    graph = graph_of("%y = neg %x : f32[4]", result="%y")
    assert rewrite(graph, [Rule("tries", ("neg",), tries)]).graph == graph


@pytest.mark.parametrize("found", [Scalar(2.0), Weight("w", Tensor(DType.F32, (4,)))])
def test_no_output_of_a_graph_becomes_a_weight_or_a_literal(found: Any) -> None:
    ops = ("%a = neg %x : f32[4]", "%y = neg %x : f32[4]", "%z = mul %a, %x : f32[4]")
    graph = graph_of(*ops, result="%y, %z")
    done = rewrite(graph, [Rule("finds", ("neg",), lambda op, view: found)])
    verify(done.graph)
    assert done.count == 1 and [v.name for v in done.graph.outputs] == ["y", "z"]
    assert [op.kind for op in done.graph.ops] == ["neg", "mul"]


def test_several_results_are_replaced_in_order() -> None:
    def swap(op: Op, view: View) -> Any:
        if op.attrs["sizes"] == (1, 3):
            return None
        left, right = view.ops("split", op.args[0], axis=0, sizes=(1, 3))
        return view.op("slice", right, axis=0, start=0, stop=3), left

    graph = graph_of("%a, %b = split %x {axis=0, sizes=[3, 1]} : f32[3], f32[1]", result="%b, %a")
    done = rewrite(graph, [Rule("swap", ("split",), swap)])
    verify(done.graph)
    assert {o.name for op in done.graph.ops for o in op.outs} >= {"a", "b"}
    out = interpret(done.graph, {"x": np.arange(4.0)}, {}).outputs
    assert out[0].tolist() == [0] and out[1].tolist() == [1, 2, 3]


def test_a_rule_sees_producers_uses_and_earlier_rewrites() -> None:
    seen: dict[str, Any] = {}

    def look(op: Op, view: View) -> Any:
        producer = view.producer(op.args[0])
        seen[op.out.name] = (None if producer is None else producer.kind, view.num_uses(op.out))
        return None

    ops = (
        "%a = pow %x, 2 : f32[4]",
        "%b = exp %a : f32[4]",
        "%c = exp %x : f32[4]",
        "%d = add %b, %b : f32[4]",
    )
    rewrite(graph_of(*ops, result="%d, %b"), [SQUARE, Rule("look", ("exp",), look)])
    assert seen == {"b": ("mul", 3), "c": (None, 0)}
    assert count_uses(graph_of(*ops, result="%d, %b")) == {"x": 2, "a": 1, "b": 3, "d": 1}


def test_new_names_do_not_clash() -> None:
    def twice(op: Op, view: View) -> Any:
        return view.op("add", view.op("exp", op.args[0], name="y"), Scalar(0.0), name="x")

    graph = graph_of("%y = abs %x : f32[4]", "%x_1 = abs %y : f32[4]", result="%x_1")
    done = rewrite(graph, [Rule("twice", ("abs",), twice)])
    verify(done.graph)
    assert done.counts == {"twice": 2} and done.graph.outputs == graph.outputs


def test_the_first_rule_that_applies_wins() -> None:
    first = Rule("first", ("pow",), lambda op, view: view.op("exp", op.args[0]))
    done = rewrite(graph_of("%y = pow %x, 2 : f32[4]", result="%y"), [first, SQUARE])
    assert done.counts == {"first": 1} and lines(done.graph)[0] == "%y = exp %x : f32[4]"


def test_rules_that_do_not_settle_are_named() -> None:
    swap = Rule("swap", ("add",), lambda op, view: view.op("add", op.args[1], op.args[0]))
    graph = graph_of("%y = add %x, @w: f32[4] : f32[4]", result="%y")
    with pytest.raises(RuntimeError, match=r"rules \['swap'\] do not settle on graph @g"):
        rewrite(graph, [swap])


def test_an_output_stays_a_value_of_its_type() -> None:
    graph = graph_of("%y = neg %x : f32[4]", result="%y")
    with pytest.raises(RuntimeError, match="replaced %y, an output"):
        rewrite(graph, [Rule("sign", ("neg",), lambda op, view: view.op("lt", op.args[0], op.args[0]))])


def test_the_number_of_results_must_agree() -> None:
    graph = graph_of("%y = neg %x : f32[4]", result="%y")
    with pytest.raises(RuntimeError, match="rule two gave 2 values for 1 results"):
        rewrite(graph, [Rule("two", ("neg",), lambda op, view: (op.args[0], op.args[0]))])


def test_the_arena_and_bounds_are_kept() -> None:
    graph = parse(
        "graph @g(%x: f32[T]) dims {T: 1..9} arena [4*T] {\n  %y = pow %x, 2 : f32[T]\n  return %y\n}"
    )
    done = rewrite(graph, [SQUARE]).graph
    assert (done.dims, done.arena, done.inputs) == (graph.dims, graph.arena, graph.inputs)
