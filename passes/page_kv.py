"""Pack all tokens of all sequences into one axis, and put keys and values into a paged cache.

Packing is sound only if every op that does not know about sequences treats tokens independently. This pass
proves it op by op as it lowers (the token-axis proof), and refuses, naming the op, where something mixes
tokens or depends on the sequence length. Attention becomes `kv_write` and `paged_attention` (PagedAttention,
arXiv 2309.06180), a linear recurrence `paged_recurrence`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ir.build import GraphBuilder
from ir.dims import Bounds, CeilDiv, free_names, normalize
from ir.graph import Graph, Op, Value
from ir.ops import OPS
from ir.types import DType, Tensor
from passes.base import Pass, PassError, Result
from passes.paging import experts
from passes.paging.groups import plan_groups
from passes.paging.layout import R, T, layout_of
from passes.paging.lowering import Lowering, Placed
from passes.paging.rules import RULES, depends_on_length, pointwise

NARROW_ERROR = 0.2  # share of a value's RMS: scores of rounded keys differ, and the softmax makes that larger
STEP_INPUT = re.compile(r"lens|starts|rows|(kv|slots|table)\d+")
SIZES = frozenset({"shape", "size", "start", "stop", "sizes"})  # attributes that the rules prove themselves
DTYPES = ("f32", "f16", "bf16")  # of a cache that holds numbers as they are
MAX_BLOCK = 4096  # as in an artifact's manifest


@dataclass(frozen=True)
class PageKv(Pass):
    """dtype: element type of the cache. block: tokens in a block."""

    dtype: str = "f32"
    block: int = 16

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"page_kv: dtype must be {' or '.join(DTYPES)}, not {self.dtype!r}")
        if not 1 <= self.block <= MAX_BLOCK:
            raise ValueError(f"page_kv: block must be from 1 to {MAX_BLOCK} tokens, not {self.block}")

    @property
    def tolerance(self) -> float:
        return 0.0 if DType(self.dtype) is DType.F32 else NARROW_ERROR

    def run(self, graph: Graph) -> Result:
        if "S" not in graph.dims:
            return Result(graph, 0)
        graph = _make_way(graph)
        low = _start(graph, DType(self.dtype), self.block)
        for op in graph.ops:
            _lower(low, op)
        if not low.groups.types:  # said last: what mixes tokens has been named with its place by now
            reason = f"graph @{graph.name} has no attention and no recurrence"
            raise PassError("page_kv", None, reason, "octavo explain shows why none was recognised.")
        outputs = [_output(low, v) for v in graph.outputs]
        return Result(low.builder.graph([*outputs, *low.groups.states]), len(low.groups.states))


def _make_way(graph: Graph) -> Graph:
    """The graph with other names for values that are called what the paged form calls its inputs."""
    taken = set(graph.producers())
    names: dict[str, Value] = {}
    for value in (o for op in graph.ops for o in op.outs if STEP_INPUT.fullmatch(o.name)):
        name = f"{value.name}_"
        while name in taken:
            name += "_"
        taken.add(name)
        names[value.name] = Value(name, value.type)
    outputs = tuple(names.get(v.name, v) for v in graph.outputs)
    return replace(graph, ops=tuple(op.renamed(names) for op in graph.ops), outputs=outputs)


def _start(graph: Graph, dtype: DType, block: int) -> Lowering:
    context = graph.dims["S"][1]
    if context is None:
        raise PassError("page_kv", None, "the sequence length S has no upper bound", "Give --max-context N.")
    groups = plan_groups(graph, dtype, block)
    blocks = int(normalize(CeilDiv(context, block)))
    dims: dict[str, Bounds] = {"T": (1, None), "R": (1, None)}
    dims |= {f"M{g}": (1, blocks) for g in range(len(groups.types))}
    builder = GraphBuilder(graph.name, dims)
    builder.reserve(graph.producers())
    placed = {value.name: _input(builder, value) for value in graph.inputs}
    lens = builder.input("lens", Tensor(DType.I32, (R,)))
    starts = builder.input("starts", Tensor(DType.I32, (R + 1,)))
    groups.declare_inputs(builder)
    return Lowering(builder, groups, lens, starts, placed)


def _input(builder: GraphBuilder, value: Value) -> Placed:
    layout = layout_of(value.type.shape) if isinstance(value.type, Tensor) else None
    if layout is None or layout.kept or not isinstance(value.type, Tensor):
        raise PassError("page_kv", None, f"input %{value.name} is not [1,S]")
    return Placed(builder.input(value.name, Tensor(value.type.dtype, (T,))), layout)


def _lower(low: Lowering, op: Op) -> None:
    fixed = all(low.layout(a) is None for a in op.args) and not any(depends_on_length(o) for o in op.outs)
    if fixed and op.kind not in ("dim", "attention", "recurrence"):
        low.keep(op)
        return
    for name, attr in op.attrs.items():
        if name not in SIZES and "S" in free_names(attr):
            low.refuse(op, f"its {name} is computed from the sequence length ({attr})")
    rule = experts.RULES.get(op.kind) or RULES.get(op.kind, pointwise if OPS[op.kind].pointwise else None)
    if rule is None:
        low.refuse(op, f"{op.kind} mixes tokens, or there is no proof that it does not")
    rule(low, op)


def _output(low: Lowering, value: Value) -> Value:
    placed = low.placed[value.name]
    if placed.layout is None or not isinstance(placed.arg, Value):
        raise PassError("page_kv", None, f"output %{value.name} does not depend on the tokens")
    return placed.arg
