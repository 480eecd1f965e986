"""Compute logits only for the rows that are asked for.

Every op that no attention depends on runs on the Q rows in `%rows`; where such an op reads a value of all T
tokens, `take_rows` picks the rows first. So the head, and all that follows the last attention, is paid for
once per wanted token.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

from ir.build import GraphBuilder
from ir.dims import free_names, substitute, symbol
from ir.graph import Arg, Graph, Op, Value
from ir.ops import OPS
from ir.types import DType, Tensor
from passes.base import Pass, Result
from passes.paging.layout import T

Q = symbol("Q")


@dataclass(frozen=True)
class SelectRows(Pass):
    def run(self, graph: Graph) -> Result:
        if "T" not in graph.dims or "Q" in graph.dims:
            return Result(graph, 0)
        needed = _before_attention(graph)
        after = [op for op in graph.ops if op.outs[0].name not in needed and _has_tokens(op)]
        return Result(_select(graph, {id(op) for op in after}), len(after))


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


def _select(graph: Graph, chosen: set[int]) -> Graph:
    builder = GraphBuilder(graph.name, {**graph.dims, "Q": (0, None)}, graph.inputs)
    rows = builder.input("rows", Tensor(DType.I32, (Q,)))
    builder.reserve(graph.producers())
    taken: dict[str, Value] = {}

    def rows_of(arg: Arg, loc: str) -> Arg:
        if not isinstance(arg, Value) or not isinstance(arg.type, Tensor) or not _is_per_token(arg.type):
            return arg
        if arg.name not in taken:
            taken[arg.name] = builder.op("take_rows", arg, rows, name=f"{arg.name}.rows", loc=loc)
        return taken[arg.name]

    for op in graph.ops:
        if id(op) not in chosen:
            builder.ops.append(op)
            continue
        args = tuple(rows_of(a, op.loc) for a in op.args)
        outs = tuple(Value(o.name, _on_rows(o.type)) for o in op.outs)
        attrs = {name: _on_rows_attr(a) for name, a in op.attrs.items()}
        builder.ops.append(replace(op, args=args, attrs=attrs, outs=outs))
        taken.update((o.name, o) for o in outs)
    return builder.graph([_output(v, rows_of) for v in graph.outputs])


def _output(value: Value, rows_of: Any) -> Value:
    chosen = rows_of(value, "")
    assert isinstance(chosen, Value)
    return chosen


def _is_per_token(type: Tensor) -> bool:
    first: Any = type.shape[0] if type.shape else 0
    return bool(first == T)


def _on_rows(type: Any) -> Any:
    return (
        Tensor(type.dtype, tuple(_on_rows_attr(d) for d in type.shape)) if isinstance(type, Tensor) else type
    )


def _on_rows_attr(attr: Any) -> Any:
    if isinstance(attr, tuple):
        return tuple(_on_rows_attr(a) for a in cast("tuple[Any, ...]", attr))
    return substitute(attr, {"T": Q})
