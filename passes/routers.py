"""The linears whose results choose among experts: those that `topk` picks from, seen through what follows."""

from __future__ import annotations

from collections.abc import Mapping

from ir.graph import Arg, Graph, Op, Value

_ENDS = frozenset({"linear", "qlinear", "moe_linear", "qmoe_linear", "embed", "attention", "paged_attention"})


def routers(graph: Graph) -> frozenset[str]:
    """Names of the results of such linears."""
    makers, seen = graph.producers(), dict[str, Op]()
    for op in graph.ops:
        if op.kind == "topk":
            _look(op.args[0], makers, seen)
    return frozenset(name for name, op in seen.items() if op.kind in ("linear", "qlinear"))


def _look(arg: Arg, makers: Mapping[str, Op], seen: dict[str, Op]) -> None:
    """Note what makes a value, as far back as the first ops that read a matrix or other tokens."""
    waiting = [arg]
    while waiting:
        arg = waiting.pop()
        op = makers.get(arg.name) if isinstance(arg, Value) else None
        if op is None or op.outs[0].name in seen:
            continue
        seen[op.outs[0].name] = op
        waiting += [] if op.kind in _ENDS else op.args
