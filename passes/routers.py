"""The linears whose results choose among experts: those that `topk` picks from, seen through what follows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from ir.graph import Arg, Graph, Op, Value
from passes.linears import EXPERTS

Makers = Mapping[str, Op]  # of values, by name

_LINEARS = ("linear", "qlinear")
# Ops that read a matrix or other tokens: what chooses is looked for no further back.
READERS = frozenset({*_LINEARS, *EXPERTS, "embed", "attention", "paged_attention"})


def routers(graph: Graph) -> frozenset[str]:
    """Names of the results of such linears."""
    makers = graph.producers()
    scores = [op.args[0] for op in graph.ops if op.kind == "topk"]
    found = (op for arg in scores for op in behind(arg, makers) if op.kind in _LINEARS)
    return frozenset(op.outs[0].name for op in found)


def behind(arg: Arg, makers: Makers, ends: Collection[str] = READERS) -> Iterator[Op]:
    """What makes a value, the nearest first, as far back as the first ops of the kinds `ends`, these too."""
    waiting, seen = [arg], set[str]()
    while waiting:
        arg = waiting.pop(0)
        op = makers.get(arg.name) if isinstance(arg, Value) else None
        if op is None or op.outs[0].name in seen:
            continue
        seen.add(op.outs[0].name)
        yield op
        waiting += [] if op.kind in ends else op.args
