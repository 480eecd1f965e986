"""What the page of an artifact shows, as JSON."""

from __future__ import annotations

from typing import Any

from codegen.costs import StepShape, label
from compiler.errors import CompileError
from compiler.inspect.arena import ArenaPlan, arena_plan
from compiler.inspect.graph_of import graph_of
from compiler.inspect.pool import GraphPool, Pool, pairs
from compiler.inspect.stages import StageFile, stages
from compiler.inspect.summary import summary
from compiler.kernels import kernel_figures, step_shapes
from ir.graph import Graph
from ir.text.printer import print_arg
from runtime.artifact import Artifact
from runtime.limits import Limits

Step = tuple[int | None, int | None, int | None]
OF_TARGET = ("backend", "arch", "invariant", "built_by")
CHOSEN = ("name", "digest", "made_by", "source", "model", "tokenizer", "kv_groups", "bytes", "num_weights")


def content(artifact: Artifact, step: Step) -> dict[str, Any]:
    """step: requests, cached tokens and new tokens of the step whose kernels are counted."""
    pool = GraphPool()
    stage_list, graphs = _stages(artifact)
    targets = {name: graphs[target.graph] for name, target in artifact.manifest.targets.items()}
    distinct = list({id(graph): graph for graph in graphs.values()}.values())
    number = {id(graph): n for n, graph in enumerate(distinct)}
    encoded = [pool.graph(graph) for graph in distinct]
    memory = [_memory(pool, name, graph) for name, graph in targets.items()]
    return {
        "overview": _overview(artifact),
        "stages": [{"name": s.name, "graph": number[id(graphs[s.file])]} for s in stage_list],
        "graphs": encoded,
        "diffs": {f"{a},{b}": pool.diff(a, b) for a, b in pairs(len(distinct))},
        "memory": [each for each in memory if each is not None],
        "kernels": _kernels(artifact, step),
        **pool.json(),
    }


def _stages(artifact: Artifact) -> tuple[list[StageFile], dict[str, Graph]]:
    """The stages, and the graph of each file; those of equal text are one."""
    found = stages(artifact)
    if len(artifact.manifest.targets) > 1:
        found.pop()  # `graph`, which is one of the targets'
    by_text: dict[str, Graph] = {}
    graphs: dict[str, Graph] = {}
    for stage in found:
        text = stage.read(artifact)
        if text not in by_text:
            by_text[text] = graph_of(artifact, stage)
        graphs[stage.file] = by_text[text]
    return found, graphs


def _overview(artifact: Artifact) -> dict[str, Any]:
    facts = summary(artifact)
    targets = {
        name: {key: value for key, value in target.items() if key in OF_TARGET}
        | {"kernels": [_library(each) for each in target["kernels"]] if name == "cpu" else []}
        for name, target in facts["targets"].items()
    }
    return {name: facts[name] for name in CHOSEN} | {"targets": targets}


def _library(kernel: dict[str, Any]) -> dict[str, Any]:
    return {name: kernel[name] for name in ("isa", "arch", "features")}


def _memory(pool: GraphPool, target: str, graph: Graph) -> dict[str, Any] | None:
    """Pieces: [name, whether scratch, buffer, first kernel, last kernel, form]."""
    plan = arena_plan(graph, "cpu" if target == "cpu" else "gpu")
    if plan is None:
        return None
    forms: Pool[tuple[int, ...]] = Pool()
    pieces = [
        [pool.texts.add(p.name), int(p.scratch), p.buffer, p.first, p.last, forms.add(p.form)]
        for p in plan.pieces
    ]
    limits = Limits()
    return {
        "target": target,
        "sizes": {"T": limits.max_step_tokens, "R": limits.max_requests, "Q": limits.max_rows},
        "kernels": _planned_kernels(pool, plan),
        "buffers": plan.buffers,
        "pieces": pieces,
        "forms": list(forms),
    }


def _planned_kernels(pool: GraphPool, plan: ArenaPlan) -> list[list[int]]:
    """[label, loc, first result]"""
    texts = pool.texts.add
    return [[texts(label(k)), texts(k.ops[0].loc), texts(print_arg(k.ops[0].outs[0]))] for k in plan.kernels]


def _kernels(artifact: Artifact, step: Step) -> dict[str, Any]:
    """Rows of each target; where they cannot be counted, why."""
    shapes = step_shapes(artifact.manifest.model.max_context, *step)
    return {
        "steps": {name: _told(shape) for name, shape in shapes.items()},
        "targets": {name: _rows(artifact, name, shapes) for name in artifact.manifest.targets},
    }


def _rows(artifact: Artifact, target: str, shapes: dict[str, StepShape]) -> dict[str, Any]:
    try:
        found = kernel_figures(artifact, target, shapes)
    except CompileError as error:
        return {"rows": [], "why": str(error)}
    return {"rows": [{k: v for k, v in row.json.items() if v is not None} for row in found]}


def _told(shape: StepShape) -> dict[str, int]:
    tokens = shape.counts[0]
    return {"requests": len(shape.counts), "tokens": tokens, "context": shape.lens[0] - tokens}
