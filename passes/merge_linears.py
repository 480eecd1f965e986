"""Linears that read one value become one linear and a split: query, key and value; gate and up.

A gate and the value that it multiplies are a group of their own, gate first, so that `fuse_epilogue` can fold
the product. A linear that an activation reads stays alone, and so does one whose outputs are cut up already.
Stacks of experts that the same slots read are merged expert by expert. What chooses among experts stays
apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

from ir.build import GraphBuilder
from ir.graph import Arg, Graph, Op, Value
from ir.rewrite import Miss, count_uses
from passes.base import Pass, Result
from passes.linears import LINEARS, bias_of, experts_of, residual_of
from passes.match import ACTIVATION_KINDS, attribute, dtype, last_axis, shape
from passes.routers import routers
from passes.rows_of import code_format

Group = tuple[Op, ...]


@dataclass(frozen=True)
class MergeLinears(Pass):
    def run(self, graph: Graph) -> Result:
        misses: list[Miss] = []
        groups = _groups(graph, misses)
        if not groups:
            return Result(graph, 0, tuple(misses))
        return Result(_Merger(graph, groups).run(), len(groups), tuple(misses))


def _groups(graph: Graph, misses: list[Miss]) -> list[Group]:
    users = graph.users()
    found: list[Group] = []
    for candidates in _by_input(graph).values():
        pairs = _gated_pairs(candidates, graph, users)
        paired = {op.out.name for pair in pairs for op in pair}
        rest = [op for op in candidates if op.out.name not in paired and _is_free(op, users, misses)]
        found += [*pairs, *([tuple(rest)] if len(rest) > 1 else [])]
    return found


def _by_input(graph: Graph) -> dict[Any, list[Op]]:
    """Plain linears with constant operands, by what they read and the formats of weight and result."""
    found: dict[Any, list[Op]] = {}
    constants, makers, routing = graph.constants(), graph.producers(), routers(graph)
    for op in graph.ops:
        if op.kind not in LINEARS or residual_of(op) is not None or attribute(op, "gated"):
            continue
        weights = [a for a in (op.args[1], bias_of(op)) if isinstance(a, Value)]
        if attribute(op, "activation") != "none" or any(w.name not in constants for w in weights):
            continue
        kinds = dtype(op.args[1]), code_format(makers, op.args[1]), dtype(op.out)
        read = op.args[0], experts_of(op), op.attr("num_experts"), op.out.name in routing
        found.setdefault((*read, *kinds), []).append(op)
    return found


def _is_free(op: Op, users: dict[str, list[Op]], misses: list[Miss]) -> bool:
    """Whether a linear can be merged with its neighbours without keeping another fusion from happening."""
    readers = users.get(op.out.name, [])
    if readers and all(_cuts(r, op) for r in readers):
        return False
    if any(r.kind in ACTIVATION_KINDS for r in readers):
        misses.append(Miss("merge linears", op, "an activation reads it, which becomes its epilogue"))
        return False
    return bool(readers)


def _cuts(reader: Op, op: Op) -> bool:
    return reader.kind in ("split", "slice") and attribute(reader, "axis") == last_axis(op.out)


def _gated_pairs(candidates: Sequence[Op], graph: Graph, users: dict[str, list[Op]]) -> list[Group]:
    """(gate, up) where act(gate) * up, or gate * up, is all that reads them."""
    by_name = {op.out.name: op for op in candidates}
    uses = count_uses(graph)
    pairs: list[Group] = []
    taken: set[str] = set()
    for gate in candidates:
        reader = _only(gate.out, users, uses)
        product = _only(reader.out, users, uses) if reader and reader.kind in ACTIVATION_KINDS else reader
        if reader is None or product is None or product.kind != "mul" or gate.out.name in taken:
            continue
        gated = gate.out if product is reader else reader.out
        others = [a for a in product.args if isinstance(a, Value) and a != gated]
        up = by_name.get(others[0].name) if len(others) == 1 else None
        if up is None or uses[up.out.name] != 1 or up.out.type != gate.out.type or up.out.name in taken:
            continue
        pairs.append((gate, up))
        taken |= {gate.out.name, up.out.name}
    return pairs


def _only(value: Value, users: dict[str, list[Op]], uses: Any) -> Op | None:
    readers = users.get(value.name, [])
    return readers[0] if len(readers) == 1 and uses[value.name] == 1 else None


class _Merger:
    """Builds the graph anew: a group's linear stands where its first member stood, after its weight ops."""

    def __init__(self, graph: Graph, groups: Sequence[Group]) -> None:
        self.graph = graph
        self.group_of = {op.out.name: group for group in groups for op in group}
        self.producers = graph.producers()
        self.build = GraphBuilder(graph.name, graph.dims, graph.inputs)
        self.done: set[str] = set()
        self.build.reserve(self.producers)

    def run(self) -> Graph:
        for op in self.graph.ops:
            group = self.group_of.get(op.outs[0].name)
            if group is None:
                self.emit(op)
            elif op.outs[0].name not in self.done:
                self.merge(group)
        return replace(self.build.graph(self.graph.outputs), arena=self.graph.arena)

    def emit(self, op: Op) -> None:
        if op.outs[0].name not in self.done:
            self.done.update(o.name for o in op.outs)
            self.build.ops.append(op)

    def need(self, arg: Arg) -> None:
        """Emit the weight ops that an operand is made by, if that has not happened."""
        op = self.producers.get(arg.name) if isinstance(arg, Value) else None
        if op is not None and op.outs[0].name not in self.done:
            for inner in op.args:
                self.need(inner)
            self.emit(op)

    def merge(self, group: Group) -> None:
        for op in group:
            for arg in op.args[1:]:
                self.need(arg)
        loc = _common_loc([op.loc for op in group])
        first, experts = group[0], experts_of(group[0])
        bias = self.bias(group, loc)
        if experts is None:
            weight = self.build.op("concat", *(op.args[1] for op in group), axis=0, loc=loc)
            args = [first.args[0], weight, *bias]
        else:
            args = [first.args[0], self.stack(group, loc), experts, *bias]
        name = "_".join(op.out.name.rpartition(".")[2] if i else op.out.name for i, op in enumerate(group))
        attrs: dict[str, Any] = {**first.attrs}
        merged = self.build.op(first.kind, *args, name=name, loc=loc, several=False, **attrs)
        sizes = tuple(cast(int, shape(op.out)[-1]) for op in group)
        cut = {"axis": last_axis(merged), "sizes": sizes}
        self.build.ops.append(Op("split", (merged,), cut, tuple(op.out for op in group), loc))
        self.done.update(op.out.name for op in group)

    def stack(self, group: Group, loc: str) -> Value:
        """Each expert's rows of one stack after those of another: [E*N,K] with N the sum of theirs."""
        count = cast(int, group[0].attrs["num_experts"])
        parts: list[Arg] = []
        for op in group:
            rows, width = shape(op.args[1])
            sizes = (count, cast(int, rows) // count, width)
            parts.append(self.build.op("reshape", op.args[1], shape=sizes, loc=loc))
        joined = self.build.op("concat", *parts, axis=1, loc=loc)
        _, each, width = shape(joined)
        return self.build.op("reshape", joined, shape=(count * cast(int, each), width), loc=loc)

    def bias(self, group: Group, loc: str) -> list[Arg]:
        """The concatenated biases, zeros where a linear has none; nothing if none has."""
        biases = [bias_of(op) for op in group]
        count = (group[0].attrs["num_experts"],) if group[0].kind == "moe_linear" else ()
        kinds = {dtype(b) for b in biases if b is not None}
        if not kinds:
            return []
        kind = str(kinds.pop())
        parts = [
            self.build.op("full", shape=(*count, shape(op.out)[-1]), value=0.0, dtype=kind, loc=loc)
            if b is None
            else b
            for op, b in zip(group, biases, strict=True)
        ]
        return [self.build.op("concat", *parts, axis=len(count), loc=loc)]


def _common_loc(locs: Iterable[str]) -> str:
    """The module path that all paths begin with."""
    parts = [loc.split(".") for loc in locs]
    shared = takewhile(lambda same: len(set(same)) == 1, zip(*parts, strict=False))
    return ".".join(same[0] for same in shared)
