"""Memory plans: lifetimes, reuse, and a checker that replays them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy

from ir.build import GraphBuilder
from ir.dims import CeilDiv, symbol
from ir.graph import Graph, Value, Weight
from ir.types import DType, Tensor
from ir.verify import verify
from passes.group_pointwise import GroupPointwise
from passes.memory.replay import check_plan
from passes.memory.sizes import PlanError, linear_form
from passes.plan_memory import PlanMemory

T, Q = symbol("T"), symbol("Q")


def weight(name: str, *shape: int) -> Weight:
    return Weight(name, Tensor(DType.F32, shape))


def chain(length: int) -> Graph:
    """x -> norm -> norm -> ... : no value lives past the next op."""
    b = GraphBuilder("g", {"T": (1, None)})
    x = b.input("ids", Tensor(DType.I32, (T,)))
    y: Value = b.op("embed", x, weight("table", 10, 32))
    for _ in range(length):
        y = b.op("rms_norm", y, eps=1e-5)
    return b.graph([y])


def planned(graph: Graph) -> Graph:
    done = PlanMemory().run(GroupPointwise().run(graph).graph).graph
    verify(done)
    return done


def test_a_chain_needs_two_buffers() -> None:
    graph = planned(chain(7))
    assert graph.arena == (128 * T, 128 * T)
    assert [op.attrs["at"] for op in graph.ops] == [(0,), (1,), (0,), (1,), (0,), (1,), (0,), (-1,)]


def test_the_logits_are_written_where_the_caller_wants_them() -> None:
    assert planned(chain(2)).ops[-1].attrs["at"] == (-1,)


def test_what_is_read_later_keeps_its_buffer() -> None:
    b = GraphBuilder("g", {"T": (1, None)})
    x = b.op("embed", b.input("ids", Tensor(DType.I32, (T,))), weight("table", 10, 32))
    y = b.op("rms_norm", b.op("rms_norm", x, eps=1e-5), eps=1e-5)
    graph = planned(b.graph([b.op("add", x, y)]))
    first = graph.ops[0].attrs["at"][0]
    assert all(op.attrs["at"][0] != first for op in graph.ops[1:])


def test_a_view_keeps_its_roots_memory_alive() -> None:
    b = GraphBuilder("g", {"T": (1, None)})
    x = b.op("embed", b.input("ids", Tensor(DType.I32, (T,))), weight("table", 10, 32))
    left, right = b.op("split", x, axis=1, sizes=(16, 16), several=True)
    y = b.op("rms_norm", b.op("rms_norm", left, eps=1e-5), eps=1e-5)
    graph = planned(b.graph([b.op("add", y, right)]))
    assert graph.ops[1].attrs["at"] == (0, 0)
    assert all(op.attrs["at"][0] != 0 for op in graph.ops[2:])


def test_values_inside_a_group_have_no_buffer() -> None:
    b = GraphBuilder("g", {"T": (1, None)})
    x = b.op("embed", b.input("ids", Tensor(DType.I32, (T,))), weight("table", 10, 32))
    y = b.op("tanh", b.op("exp", x))
    graph = planned(b.graph([b.op("rms_norm", y, eps=1e-5)]))
    assert graph.ops[1].attrs["at"] == (-1,) and graph.ops[2].attrs["at"] == (1,)


def test_a_linear_has_scratch_for_its_rows() -> None:
    b = GraphBuilder("g", {"T": (1, None)})
    x = b.op("embed", b.input("ids", Tensor(DType.I32, (T,))), weight("table", 10, 32))
    y = b.op("linear", x, weight("w", 8, 32))
    graph = planned(b.graph([b.op("rms_norm", y, eps=1e-5)]))
    out, scratch = graph.ops[1].attrs["at"]
    assert out != scratch and graph.arena[scratch] == 128 * T


def test_sizes_are_linear_forms_in_multiples_of_64_bytes() -> None:
    assert linear_form(3 * T + 7 * Q + 5) == {"T": 4, "R": 0, "Q": 8, "": 64}
    with pytest.raises(PlanError, match="not a linear form"):
        linear_form(T * Q)


def test_a_size_that_is_no_polynomial_is_refused() -> None:
    """It left the pass as sympy's own error."""
    with pytest.raises(PlanError, match="not a linear form"):
        linear_form(CeilDiv(symbol("T"), sympy.Integer(16)))


def test_the_checker_finds_a_value_that_was_overwritten() -> None:
    graph = planned(chain(4))
    broken = replace(
        graph, ops=tuple(op.with_attrs(at=(0,)) if i == 1 else op for i, op in enumerate(graph.ops))
    )
    with pytest.raises(PlanError, match="is in use"):
        check_plan(broken)


def test_the_checker_finds_a_buffer_that_is_too_small() -> None:
    graph = planned(chain(4))
    with pytest.raises(PlanError, match="does not fit"):
        check_plan(replace(graph, arena=(graph.arena[0], 64 * T)))


def test_the_checker_finds_a_read_of_something_else() -> None:
    b = GraphBuilder("g", {"T": (1, None)})
    x = b.op("embed", b.input("ids", Tensor(DType.I32, (T,))), weight("table", 10, 32))
    y = b.op("rms_norm", b.op("rms_norm", x, eps=1e-5), eps=1e-5)
    graph = planned(b.graph([b.op("add", x, y)]))
    broken = [op.with_attrs(at=(0,)) if i == 2 else op for i, op in enumerate(graph.ops)]
    with pytest.raises(PlanError, match="which holds"):
        check_plan(replace(graph, ops=tuple(broken)))
