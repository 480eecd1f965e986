"""Canonical form: one spelling for what models write in many ways, so that a later pattern is one pattern.

A rule is exact (same numbers), except that activations written out (gelu, silu, sigmoid) become one op and
differ in rounding. Ops left without users are for `dce`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Graph
from ir.rewrite import keep_output_names, rewrite
from passes.base import Pass, Result
from passes.canonical import activations, arithmetic, linears, moves, products, rows

MAX_SWEEPS = 30


@dataclass(frozen=True)
class Canonicalize(Pass):
    def run(self, graph: Graph) -> Result:
        rules = (
            *moves.RULES,
            *arithmetic.RULES,
            *activations.RULES,
            *linears.RULES,
            *products.RULES,
            *rows.RULES,
        )
        found = rewrite(graph, rules, MAX_SWEEPS)
        return Result(keep_output_names(graph, found.graph), found.count, found.misses)
