"""What every target's printers ask of operands."""

from __future__ import annotations

from typing import cast

from ir.dims import Dim
from ir.graph import Arg, Graph, Value, tensor_of
from ir.types import KV, DType


def shape_of(arg: Arg) -> tuple[Dim, ...]:
    return tensor_of(arg).shape


def dtype_of(arg: Arg) -> DType:
    return tensor_of(arg).dtype


def kv_groups(graph: Graph) -> dict[str, int]:
    """The KV group of every state: groups are numbered in order of the graph's inputs."""
    states = [v for v in graph.inputs if isinstance(v.type, KV)]
    found = {v.name: index for index, v in enumerate(states)}
    for op in graph.ops:
        for out in op.outs:
            if isinstance(out.type, KV):
                found[out.name] = found[cast(Value, op.args[0]).name]
    return found
