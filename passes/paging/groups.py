"""KV groups: which attention keeps its keys and values where, and which recurrence its state.

Those whose streams have the same shape and lifetime share a group, so that one block table serves all their
layers. Two attentions with the same key and value (a layer that reads another layer's cache) share a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Arg, Graph, Op, Value
from ir.ops.recurrence import recurrence_streams
from ir.predicates import window_of
from ir.types import KV, DType, Stream, Tensor
from passes.base import PassError
from passes.match import operand, shape
from passes.paging.layout import R, T


@dataclass(frozen=True)
class Slot:
    """Where one op reads: the group's state (an attention's: after the write), its table, the layer in it."""

    state: Value
    table: Value
    layer: int


@dataclass
class Groups:
    """The groups of a graph, and their current states while it is being lowered."""

    types: tuple[KV, ...]
    layers: dict[str, tuple[int, int]]  # result name -> (group, layer)
    states: list[Value] = field(default_factory=list[Value])
    _slots: list[Value | None] = field(default_factory=list["Value | None"])  # a recurrence finds its own
    _tables: list[Value] = field(default_factory=list[Value])
    _written: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def declare_inputs(self, builder: GraphBuilder) -> None:
        for g, kv in enumerate(self.types):
            self.states.append(builder.input(f"kv{g}", kv))
            slots = None if kv.state else builder.input(f"slots{g}", Tensor(DType.I32, (T,)))
            self._slots.append(slots)
            self._tables.append(builder.input(f"table{g}", Tensor(DType.I32, (R, symbol(f"M{g}")))))

    def place(self, builder: GraphBuilder, op: Op, k: Arg, v: Arg) -> Slot:
        """Write an attention's keys and values, once per layer, and say where they are."""
        group, layer = self.layers[op.outs[0].name]
        if (group, layer) not in self._written:
            self._written.add((group, layer))
            name = f"kv{group}.{layer}"
            slots = self._slots[group]
            self.states[group] = builder.op(
                "kv_write", self.states[group], k, v, slots, name=name, loc=op.loc, layer=layer
            )
        return Slot(self.states[group], self._tables[group], layer)

    def slot(self, op: Op) -> Slot:
        """Where a recurrence reads and writes."""
        group, layer = self.layers[op.outs[0].name]
        return Slot(self.states[group], self._tables[group], layer)

    def wrote(self, op: Op, state: Value) -> None:
        """Go on from what a recurrence has written."""
        self.states[self.layers[op.outs[0].name][0]] = state


def plan_groups(graph: Graph, dtype: DType, block: int) -> Groups:
    """The groups of a graph's attentions and recurrences, in order of first use. Raises PassError."""
    shapes: dict[tuple[int | None, bool, tuple[Stream, ...]], int] = {}
    counts: list[int] = []
    shared: dict[tuple[int, Arg, Arg], int] = {}
    layers: dict[str, tuple[int, int]] = {}
    for op in (o for o in graph.ops if o.kind in ("attention", "recurrence")):
        state = op.kind == "recurrence"
        window = None if state else window_of(op.attrs.get("mask"))
        streams = _recurrence_streams(op) if state else _streams(op, dtype)
        group = shapes.setdefault((window, state, streams), len(shapes))
        if group == len(counts):
            counts.append(0)
        layer = counts[group] if state else shared.setdefault((group, op.args[1], op.args[2]), counts[group])
        counts[group] = max(counts[group], layer + 1)
        layers[op.outs[0].name] = (group, layer)
    types = tuple(
        KV(streams, count, block, window, state=state)
        for ((window, state, streams), count) in zip(shapes, counts, strict=True)
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


def _recurrence_streams(op: Op) -> tuple[Stream, ...]:
    (_, groups, _, keys), (_, heads, _, size) = shape(op.args[1]), shape(op.args[2])
    decay, fixed = shape(op.args[3])[3], (groups, keys, heads, size)
    if not all(isinstance(n, int) for n in (*fixed, decay)):
        raise PassError("page_kv", op, "the recurrence's heads and sizes are not fixed")
    return recurrence_streams(
        cast("tuple[int, int]", (groups, keys)),
        cast("tuple[int, int]", (heads, size)),
        cast(int, decay),
        operand(op, 4) is not None,
    )
