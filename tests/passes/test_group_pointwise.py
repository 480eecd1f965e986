"""Pointwise groups: what joins, what may not, and that the graph computes the same."""

from __future__ import annotations

import networkx as nx
import numpy as np

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Value
from ir.interpret import interpret
from ir.types import KV, DType, Stream, Tensor
from ir.verify import verify
from passes.group_pointwise import GroupPointwise, dependencies, is_convex

T = symbol("T")


def builder() -> tuple[GraphBuilder, Value]:
    b = GraphBuilder("g", {"T": (1, None)})
    return b, b.input("x", Tensor(DType.F32, (T, 6)))


def groups(graph: Graph) -> list[list[str]]:
    found: dict[int, list[str]] = {}
    for op in graph.ops:
        if op.attr("group") is not None:
            found.setdefault(op.attrs["group"], []).append(op.kind)
    return list(found.values())


def run(graph: Graph) -> Graph:
    done = GroupPointwise().run(graph).graph
    verify(done)
    x = np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)
    before, after = (interpret(g, {"x": x}, {}) for g in (graph, done))
    assert all(np.array_equal(a, b) for a, b in zip(before.outputs, after.outputs, strict=True))
    return done


def test_a_chain_is_one_group() -> None:
    b, x = builder()
    y = b.op("tanh", b.op("mul", b.op("add", x, x), x))
    assert groups(run(b.graph([y]))) == [["add", "mul", "tanh"]]


def test_an_op_joins_where_its_operands_are() -> None:
    b, x = builder()
    y = b.op("mul", b.op("cos", x), b.op("sin", x))
    assert sorted(map(sorted, groups(run(b.graph([y]))))) == [["cos"], ["mul", "sin"]]


def test_a_reduction_between_keeps_groups_apart() -> None:
    """exp -> sum -> div reads exp again: one group of exp and div would wait for itself."""
    b, x = builder()
    e = b.op("exp", x)
    y = b.op("div", e, b.op("sum", e, axes=(1,), keepdims=True))
    done = run(b.graph([y]))
    assert groups(done) == [["exp"], ["div"]]
    assert len(GroupPointwise().run(b.graph([y])).misses) == 1


def test_a_groups_ops_stand_together() -> None:
    b, x = builder()
    first = b.op("exp", x)
    other = b.op("sum", x, axes=(1,), keepdims=True)
    second = b.op("neg", first)
    done = run(b.graph([second, other]))
    kinds = [op.kind for op in done.ops]
    assert kinds.index("neg") == kinds.index("exp") + 1


def test_other_sizes_do_not_join() -> None:
    b, x = builder()
    y = b.op("add", b.op("neg", b.op("sum", x, axes=(1,), keepdims=True)), x)
    assert groups(run(b.graph([y]))) == [["neg"], ["add"]]


def test_convexity_agrees_with_paths() -> None:
    """Against networkx's own reachability, on random graphs."""
    rng = np.random.default_rng(1)
    for _ in range(60):
        dag = nx.DiGraph()
        dag.add_nodes_from(range(9))
        dag.add_edges_from((a, b) for a in range(9) for b in range(a + 1, 9) if rng.random() < 0.25)
        members = {int(m) for m in rng.choice(9, 3, replace=False)}
        inside = {n for n in range(9) for a in members for b in members
                  if n in nx.descendants(dag, a) and b in nx.descendants(dag, n)}  # fmt: skip
        assert is_convex(dag, members) == (inside <= members)


def test_readers_of_kv_state_run_before_its_next_write() -> None:
    b = GraphBuilder("g", {"T": (1, None), "R": (1, None), "M": (1, 4)})
    t, r = symbol("T"), symbol("R")
    kv = b.input("kv", KV((Stream("k", DType.F32, 1, 2), Stream("v", DType.F32, 1, 2)), 1))
    q = b.input("q", Tensor(DType.F32, (t, 1, 2)))
    ints = {n: b.input(n, Tensor(DType.I32, s)) for n, s in
            {"slots": (t,), "table": (r, symbol("M")), "lens": (r,), "starts": (r + 1,)}.items()}  # fmt: skip
    one = b.op("kv_write", kv, q, q, ints["slots"], layer=0)
    read = b.op("paged_attention", q, one, ints["table"], ints["lens"], ints["starts"], layer=0, scale=1.0,
                mask=True)  # fmt: skip
    two = b.op("kv_write", one, q, q, ints["slots"], layer=0)
    assert dependencies(b.graph([read, two])).has_edge(1, 2)
