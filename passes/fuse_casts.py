"""Fold casts to bf16 into the ops that make the values: a linear, a norm or an attention stores bf16.

A cast is folded where nothing else reads the value, seen through moves of whole rows. The op computes in f32
as before and rounds once, so no number changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ir.build import GraphBuilder
from ir.graph import Graph, Op, Value, tensor_of
from ir.rewrite import Miss, count_uses
from ir.types import DType
from passes.base import Pass, Result
from passes.match import dtype

_MAKERS = (
    "linear",
    "qlinear",
    "moe_linear",
    "qmoe_linear",
    "rms_norm",
    "layer_norm",
    "paged_attention",
)  # their result may be of another float type
_MOVES = ("reshape", "take_rows")


@dataclass(frozen=True)
class FuseCasts(Pass):
    def run(self, graph: Graph) -> Result:
        makers, uses = graph.producers(), count_uses(graph)
        constants = graph.constants()
        folded: dict[str, list[Op]] = {}  # by the cast's result: the maker, then moves
        misses: list[Miss] = []
        for op in graph.ops:
            if op.kind != "cast" or op.out.name in constants or not _narrows(op):
                continue
            chain = _chain(op, makers)
            if chain and all(uses[made.out.name] == 1 for made in chain):
                folded[op.out.name] = chain
            elif chain:
                misses.append(Miss(self.name, op, "the value is read elsewhere too"))
        return Result(_fold(graph, folded), len(folded), tuple(misses))


def _narrows(cast: Op) -> bool:
    return dtype(cast.args[0]) is DType.F32 and dtype(cast.out) is DType.BF16


def _chain(cast: Op, makers: Mapping[str, Op]) -> list[Op]:
    """The op that makes what is cast and the moves after it; nothing if it cannot round its result."""
    found: list[Op] = []
    source = cast.args[0]
    while isinstance(source, Value) and source.name in makers:
        op = makers[source.name]
        found.insert(0, op)
        if op.kind in _MAKERS:
            return found
        if op.kind not in _MOVES:
            break
        source = op.args[0]
    return []


def _fold(graph: Graph, folded: Mapping[str, list[Op]]) -> Graph:
    """The graph without these casts; the last op of each chain takes the cast's name."""
    names = GraphBuilder(graph.name, graph.dims, graph.inputs)
    names.reserve(graph.producers())
    narrow: dict[str, Value] = {}  # what a value of a chain has become
    for cast_name, chain in folded.items():
        for op in chain[:-1]:
            name = names.unique(f"{op.out.name}.bf16")
            narrow[op.out.name] = Value(name, replace(tensor_of(op.out), dtype=DType.BF16))
        last = chain[-1].out
        narrow[last.name] = Value(cast_name, replace(tensor_of(last), dtype=DType.BF16))
    ops = (_narrowed(op, narrow) for op in graph.ops if op.outs[0].name not in folded)
    return replace(graph, ops=tuple(ops))


def _narrowed(op: Op, narrow: Mapping[str, Value]) -> Op:
    op = op.reading(narrow)
    if op.outs[0].name not in narrow:
        return op
    renamed = replace(op, outs=(narrow[op.outs[0].name],))
    return renamed.with_attrs(dtype="bf16") if op.kind in _MAKERS else renamed
