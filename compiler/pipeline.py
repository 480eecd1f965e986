"""The pipeline: ONE literal list of passes from an imported graph to a lowered one, and its loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ir.graph import Graph
from ir.rewrite import Miss
from ir.verify import verify
from passes.base import Note, Pass
from passes.canonicalize import Canonicalize
from passes.convert_weights import ConvertWeights
from passes.cse import Cse
from passes.dce import Dce
from passes.fold_constants import FoldConstants
from passes.fuse_attention import FuseAttention
from passes.fuse_casts import FuseCasts
from passes.fuse_dequant import FuseDequant
from passes.fuse_epilogue import FuseEpilogue
from passes.fuse_moe import FuseMoe
from passes.fuse_norm import FuseNorm
from passes.fuse_rope import FuseRope
from passes.group_pointwise import GroupPointwise
from passes.merge_linears import MergeLinears
from passes.narrow_activations import NarrowActivations
from passes.page_kv import PageKv
from passes.paging.formats import FORMATS, KeyGrid
from passes.plan_memory import PlanMemory
from passes.quantize_activations import QuantizeActivations
from passes.quantize_kv import NONE, QuantizeKv
from passes.quantize_weights import QuantizeWeights
from passes.scan_tokens import ScanTokens
from passes.select_rows import SelectRows
from passes.shift_tokens import ShiftTokens

Reader = Callable[[str], Any]


def pipeline(
    dtype: str = "f32",
    block: int = 16,
    read: Reader | None = None,
    devices: Iterable[str] = ("cpu",),
    weights: QuantizeWeights | None = None,
    activations: QuantizeActivations | None = None,
    kv: str = "",
    keys: Mapping[str, KeyGrid] | None = None,
) -> tuple[Pass, ...]:
    """The passes in order.

    dtype: element type of linears' factors. block: tokens in a KV block.
    read: finds a weight's array by name, where a proof needs to see it (mask tables).
    devices: the kinds that memory is planned for, one after the other; all else of the graph is the same.
    weights, activations: how they are quantised, if they are.
    kv: the cache's format, one of passes.paging.formats, or an element type; "": dtype. keys: see QuantizeKv.
    """
    return (
        Canonicalize(),
        FoldConstants(),
        Cse(),
        Dce(),
        FuseAttention(read=read),
        ShiftTokens(),
        ScanTokens(read=read),
        Dce(),
        FuseNorm(),
        FuseRope(),
        FuseMoe(),
        Cse(),
        Dce(),
        MergeLinears(),
        PageKv(dtype=dtype if not kv or kv in FORMATS else kv, block=block),
        SelectRows(),
        Canonicalize(),
        weights or QuantizeWeights(),
        activations or QuantizeActivations(),
        QuantizeKv(format=kv if kv in FORMATS else NONE, keys=keys or {}),
        ConvertWeights(dtype=dtype),
        NarrowActivations(dtype=dtype),
        FuseEpilogue(),
        FoldConstants(),
        Cse(),
        FuseDequant(),
        FuseCasts(),
        Dce(),
        GroupPointwise(),
        *(PlanMemory(device=device) for device in devices),
    )


@dataclass(frozen=True)
class Stage:
    """The graph after one pass. Stage 0 is the imported graph."""

    index: int
    name: str
    graph: Graph
    count: int = 0
    misses: tuple[Miss, ...] = ()
    seconds: float = 0.0
    tolerance: float = 0.0
    notes: tuple[Note, ...] = ()


def run_pipeline(
    graph: Graph, passes: Iterable[Pass], on_stage: Callable[[Stage], None] | None = None
) -> Graph:
    """Run passes in order, verifying after each.

    Raises VerifyError with the graph and an arrow where a pass leaves it invalid, PassError where a lowering
    is refused, and what `on_stage` raises (the checker does).
    """
    verify(graph)
    report = on_stage or (lambda stage: None)
    report(Stage(0, "imported", graph))
    for index, step in enumerate(passes, 1):
        start = time.perf_counter()
        done = step.run(graph)
        verify(done.graph)
        seconds = time.perf_counter() - start
        graph = done.graph
        report(Stage(index, step.name, graph, done.count, done.misses, seconds, step.tolerance, done.notes))
    return graph
