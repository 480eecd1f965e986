"""Compute logits only for the rows that are asked for.

Every op that no attention depends on runs on the Q rows in `%rows`; where such an op reads a value of all T
tokens, `take_rows` picks the rows first. So the head, and all that follows the last attention, is paid for
once per wanted token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from ir.build import GraphBuilder
from ir.dims import free_names, substitute
from ir.graph import Graph, Op, Value
from ir.ops import OPS
from ir.types import DType, Tensor, Type
from passes.base import Pass, Result
from passes.paging.layout import Q, T


@dataclass(frozen=True)
class SelectRows(Pass):
    def run(self, graph: Graph) -> Result:
        if "T" not in graph.dims or "Q" in graph.dims:
            return Result(graph, 0)
        needed = _before_attention(graph)
        after = [op for op in graph.ops if op.outs[0].name not in needed and _has_tokens(op)]
        return Result(_Selector(graph).run({id(op) for op in after}), len(after))


def _before_attention(graph: Graph) -> set[str]:
    """Names of values that a sequence-aware op makes or depends on."""
    needed: set[str] = set()
    for op in reversed(graph.ops):
        if OPS[op.kind].sequence_aware or any(o.name in needed for o in op.outs):
            needed.update(o.name for o in op.outs)
            needed.update(v.name for v in op.values)
    return needed


def _has_tokens(op: Op) -> bool:
    return any(
        isinstance(o.type, Tensor) and any("T" in free_names(d) for d in o.type.shape) for o in op.outs
    )


class _Selector:
    """Builds the graph anew; what runs on chosen rows reads its operands through `on_rows`."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.build = GraphBuilder(graph.name, {**graph.dims, "Q": (0, None)}, graph.inputs)
        self.rows = self.build.input("rows", Tensor(DType.I32, (Q,)))
        self.taken: dict[str, Value] = {}  # what stands for a value of all tokens, by its name
        self.build.reserve(graph.producers())

    def run(self, chosen: set[int]) -> Graph:
        """chosen: identities of the ops that run on the rows alone."""
        for op in self.graph.ops:
            if id(op) in chosen:
                self.select(op)
            else:
                self.build.ops.append(op)
        return self.build.graph([self.on_rows(v) for v in self.graph.outputs])

    def select(self, op: Op) -> None:
        args = tuple(self.on_rows(a, op.loc) if isinstance(a, Value) else a for a in op.args)
        outs = tuple(Value(o.name, _on_rows(o.type)) for o in op.outs)
        attrs = {name: _on_rows_attr(a) for name, a in op.attrs.items()}
        self.build.ops.append(replace(op, args=args, attrs=attrs, outs=outs))
        self.taken.update((o.name, o) for o in outs)

    def on_rows(self, value: Value, loc: str = "") -> Value:
        """The rows of a value that has one per token; any other value as it is."""
        if not isinstance(value.type, Tensor) or not _is_per_token(value.type):
            return value
        if value.name not in self.taken:
            taken = self.build.op("take_rows", value, self.rows, name=f"{value.name}.rows", loc=loc)
            self.taken[value.name] = taken
        return self.taken[value.name]


def _is_per_token(type: Tensor) -> bool:
    first: Any = type.shape[0] if type.shape else 0
    return bool(first == T)


def _on_rows(type: Type) -> Type:
    return Tensor(type.dtype, _on_rows_attr(type.shape)) if isinstance(type, Tensor) else type


def _on_rows_attr(attr: Any) -> Any:
    if isinstance(attr, tuple):
        return tuple(_on_rows_attr(a) for a in cast("tuple[Any, ...]", attr))
    return substitute(attr, {"T": Q})
