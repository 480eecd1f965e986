"""KV groups: which attention keeps its keys and values where.

Attentions whose streams have the same shape and lifetime share a group, so that one block table serves all
their layers. Two attentions with the same key and value (a layer that reads another layer's cache) share a
layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Arg, Graph, Op, Value
from ir.predicates import window_of
from ir.types import KV, DType, Stream, Tensor
from passes.base import PassError
from passes.match import shape
from passes.paging.layout import R, T


@dataclass(frozen=True)
class Slot:
    """Where one attention reads: the group's state after the write, its table and the layer in it."""

    state: Value
    table: Value
    layer: int


@dataclass
class Groups:
    """The groups of a graph, and their current states while it is being lowered."""

    types: tuple[KV, ...]
    layers: dict[str, tuple[int, int]]  # attention's result name -> (group, layer)
    states: list[Value] = field(default_factory=list[Value])
    _slots: list[Value] = field(default_factory=list[Value])
    _tables: list[Value] = field(default_factory=list[Value])
    _written: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def declare_inputs(self, builder: GraphBuilder) -> None:
        for g, kv in enumerate(self.types):
            self.states.append(builder.input(f"kv{g}", kv))
            self._slots.append(builder.input(f"slots{g}", Tensor(DType.I32, (T,))))
            self._tables.append(builder.input(f"table{g}", Tensor(DType.I32, (R, symbol(f"M{g}")))))

    def place(self, builder: GraphBuilder, op: Op, k: Arg, v: Arg) -> Slot:
        """Write an attention's keys and values, once per layer, and say where they are."""
        group, layer = self.layers[op.outs[0].name]
        if (group, layer) not in self._written:
            self._written.add((group, layer))
            name = f"kv{group}.{layer}"
            self.states[group] = builder.op(
                "kv_write", self.states[group], k, v, self._slots[group], name=name, loc=op.loc, layer=layer
            )
        return Slot(self.states[group], self._tables[group], layer)


def plan_groups(graph: Graph, dtype: DType, block: int) -> Groups:
    """The groups of a graph's attentions, in order of first use. Raises PassError."""
    shapes: dict[tuple[Any, ...], int] = {}
    counts: list[int] = []
    shared: dict[tuple[int, Arg, Arg], int] = {}
    layers: dict[str, tuple[int, int]] = {}
    for op in (o for o in graph.ops if o.kind == "attention"):
        window, k, v = window_of(op.attrs.get("mask")), op.args[1], op.args[2]
        group = shapes.setdefault((window, _streams(op, dtype)), len(shapes))
        if group == len(counts):
            counts.append(0)
        layer = shared.setdefault((group, k, v), counts[group])
        counts[group] = max(counts[group], layer + 1)
        layers[op.outs[0].name] = (group, layer)
    types = tuple(
        KV(streams, count, block, window) for ((window, streams), count) in zip(shapes, counts, strict=True)
    )
    return Groups(types, layers)


def _streams(op: Op, dtype: DType) -> tuple[Stream, ...]:
    found: list[Stream] = []
    for name, arg in zip("kv", op.args[1:3], strict=True):
        _, heads, _, size = shape(arg) if len(shape(arg)) == 4 else (None,) * 4
        if not isinstance(heads, int) or not isinstance(size, int):
            reason = f"the attention's {name} is not [1,heads,S,head_size] with fixed sizes"
            raise PassError("page_kv", op, reason)
        found.append(Stream(name, dtype, heads, size))
    return tuple(found)
