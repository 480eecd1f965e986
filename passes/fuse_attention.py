"""Recognise attention and prove its mask.

Both softmax(q k^T) v written out and `attention` ops with a mask operand become `attention` ops whose
mask is a predicate of positions, proved never to look ahead (see passes.attention.proof). What cannot be
proved is refused at its op.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from ir.graph import Graph
from ir.interpret import WeightReader
from ir.rewrite import Rule, rewrite
from passes.attention import products
from passes.attention.given import with_mask
from passes.attention.prover import Prover
from passes.attention.tables import Tables
from passes.attention.written_out import softmax_behind, softmax_written_out, written_out
from passes.base import Note, Pass, Result, result


@dataclass(frozen=True)
class FuseAttention(Pass):
    """read: finds a weight's array by name, for masks that are arrays. The pipeline hands it over."""

    read: WeightReader | None = field(default=None, repr=False, compare=False)

    def run(self, graph: Graph) -> Result:
        prover = Prover(graph, Tables(self.read))
        rules = (
            Rule("softmax", ("div",), softmax_written_out),
            *products.RULES,
            Rule("sum of attentions", ("matmul",), partial(products.distributed, softmax_behind)),
            Rule("attention", ("matmul",), partial(written_out, prover)),
            Rule("mask", ("attention",), partial(with_mask, prover)),
        )
        done = result(rewrite(graph, rules))
        return replace(done, notes=tuple(_notes(done.graph, prover)))


def _notes(graph: Graph, prover: Prover) -> Iterator[Note]:
    """How each attention's mask was proved."""
    for op in graph.ops:
        if op.kind == "attention" and op.outs[0].name in prover.how:
            yield Note(op, prover.how[op.outs[0].name])
