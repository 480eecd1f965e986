"""Drop ops whose results nothing reads. KV state is a value, so its writes need no special care."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ir.graph import Graph, Op
from passes.base import Pass, Result


@dataclass(frozen=True)
class Dce(Pass):
    def run(self, graph: Graph) -> Result:
        live = {v.name for v in graph.outputs}
        kept: list[Op] = []
        for op in reversed(graph.ops):
            if any(out.name in live for out in op.outs):
                kept.append(op)
                live.update(v.name for v in op.values)
        ops = tuple(reversed(kept))
        return Result(replace(graph, ops=ops), len(graph.ops) - len(ops))
