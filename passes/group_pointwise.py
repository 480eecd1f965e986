"""Put pointwise ops over the same elements into groups; a group becomes one loop that reads and writes once.

A group must be convex in the dependency graph: no path may leave it and come back, or the loop could not run
in one piece. Ops are then ordered so that each group's stand together; every op of a group carries its
number as `group`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import networkx as nx

from ir.graph import Graph, Op, Value, tensor_of
from ir.ops import OPS
from ir.rewrite import Miss
from ir.types import KV
from passes.base import Pass, Result
from passes.memory.places import is_view, places

Dag = Any  # networkx.DiGraph over op indices


@dataclass(frozen=True)
class GroupPointwise(Pass):
    """most: the largest number of ops in a group."""

    most: int = 32

    def run(self, graph: Graph) -> Result:
        dag = dependencies(graph)
        group_of, misses = self._assign(graph, dag)
        order = _order(dag, group_of, len(graph.ops))
        ops = tuple(_annotate(graph.ops[i], group_of.get(i)) for i in order)
        return Result(replace(graph, ops=ops), len(set(group_of.values())), tuple(misses))

    def _assign(self, graph: Graph, dag: Dag) -> tuple[dict[int, int], list[Miss]]:
        """Each pointwise op joins the group of the latest operand it can join, else starts its own."""
        found, constants = places(graph), graph.constants()
        group_of: dict[int, int] = {}
        members: dict[int, list[int]] = {}
        misses: list[Miss] = []
        for index, op in enumerate(graph.ops):
            if not groupable(op, constants) or is_view(op, found):
                continue
            candidates = sorted({group_of[p] for p in dag.predecessors(index) if p in group_of}, reverse=True)
            joined = next((g for g in candidates if self._fits(graph, dag, members[g], index)), None)
            if candidates and joined is None:
                misses.append(
                    Miss(self.name, op, "no group of its operands can take it: another size, or a cycle")
                )
            group = len(members) if joined is None else joined
            group_of[index] = group
            members.setdefault(group, []).append(index)
        return group_of, misses

    def _fits(self, graph: Graph, dag: Dag, members: Sequence[int], index: int) -> bool:
        op, first = graph.ops[index], graph.ops[members[0]]
        if len(members) >= self.most or tensor_of(op.out).shape != tensor_of(first.out).shape:
            return False
        return is_convex(dag, {*members, index})


def groupable(op: Op, constants: Iterable[str]) -> bool:
    """Whether an op can be printed as part of a loop: pointwise (or a broadcast), and not a constant."""
    return (OPS[op.kind].pointwise or op.kind == "expand") and op.out.name not in constants


def dependencies(graph: Graph) -> Dag:
    """An edge from each op to those that must run after it: readers of its results, and the next write of KV
    state that it reads."""
    dag = cast(Dag, nx.DiGraph())
    dag.add_nodes_from(range(len(graph.ops)))
    maker = {out.name: i for i, op in enumerate(graph.ops) for out in op.outs}
    readers: dict[str, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for value in op.values:
            if value.name in maker:
                dag.add_edge(maker[value.name], index)
            if isinstance(value.type, KV):
                readers.setdefault(value.name, []).append(index)
    for name, indices in readers.items():
        writers = [i for i in indices if _writes(graph.ops[i], name)]
        dag.add_edges_from((r, w) for w in writers for r in indices if r != w)
    return dag


def _writes(op: Op, state: str) -> bool:
    """Whether it makes another state of this one: its first operand then (ir.ops), others it only reads."""
    first = op.args[0]
    return isinstance(first, Value) and first.name == state and any(isinstance(o.type, KV) for o in op.outs)


def is_convex(dag: Dag, members: set[int]) -> bool:
    """Whether no path leaves the set and comes back."""
    first, last = min(members), max(members)
    outside = {s for m in members for s in dag.successors(m)} - members
    while outside:
        node = outside.pop()
        if node > last:
            continue
        if node >= first and any(s in members for s in dag.successors(node)):
            return False
        outside |= set(dag.successors(node)) - members
    return True


def _order(dag: Dag, group_of: dict[int, int], count: int) -> list[int]:
    """The ops, each group's together, otherwise as near to the old order as dependencies allow."""
    node_of = {i: ("group", group_of[i]) if i in group_of else ("op", i) for i in range(count)}
    merged = cast(Dag, nx.DiGraph())
    members: dict[Any, list[int]] = {}
    for index in range(count):
        members.setdefault(node_of[index], []).append(index)
        merged.add_node(node_of[index])
    merged.add_edges_from((node_of[a], node_of[b]) for a, b in dag.edges if node_of[a] != node_of[b])

    def latest(node: tuple[str, int]) -> int:
        return members[node][-1]

    nodes = cast("Iterable[Any]", nx.lexicographical_topological_sort(merged, key=latest))
    return [index for node in nodes for index in members[node]]


def _annotate(op: Op, group: int | None) -> Op:
    return op if group is None else op.with_attrs(group=group)
