"""Common subexpression elimination: equal ops on equal operands are one op, the first, with its loc.

KV state needs no care: it is a value, and two writes never start from one version.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

from ir.graph import Graph, Op, Value
from ir.ops import ANNOTATIONS, OPS
from ir.rewrite import keep_output_names
from ir.text.printer import print_arg, print_attr
from passes.base import Pass, Result
from passes.match import COMMUTATIVE


@dataclass(frozen=True)
class Cse(Pass):
    def run(self, graph: Graph) -> Result:
        now: dict[str, Value] = {}
        first: dict[Hashable, Op] = {}
        kept: list[Op] = []
        for old in graph.ops:
            op = old.reading(now)
            same = first.setdefault(_key(op), op)
            if same is op:
                kept.append(op)
            else:
                now.update(zip((o.name for o in op.outs), same.outs, strict=True))
        outputs = tuple(now.get(v.name, v) for v in graph.outputs)
        after = replace(graph, ops=tuple(kept), outputs=outputs)
        return Result(keep_output_names(graph, after), len(graph.ops) - len(kept))


def _key(op: Op) -> Hashable:
    """Equal for ops that compute the same; a literal or attribute 1 differs from 1.0 and from true."""
    args = [print_arg(a) for a in op.args]
    attrs = {**OPS[op.kind].complete(op.attrs), **{k: op.attrs[k] for k in ANNOTATIONS if k in op.attrs}}
    shown = tuple((k, "" if v is None else print_attr(v)) for k, v in sorted(attrs.items()))
    return op.kind, tuple(sorted(args) if op.kind in COMMUTATIVE else args), shown
