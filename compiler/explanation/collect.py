"""From a source to its explanation: the compiler's own import and passes, watched."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from compiler import importers
from compiler.driver import Options, check_options, weight_reader
from compiler.errors import CompileError
from compiler.explanation.facts import Detail, Explanation, Model, Refusal
from compiler.explanation.layers import keys_of, split, tied_weights
from compiler.explanation.trace import Trace
from compiler.files import MAX_CONFIG_BYTES, check_links, is_file, read_file
from compiler.importers import Imported, ImportRefused
from compiler.pipeline import pipeline
from compiler.progress import Progress
from ir.graph import Graph, tensor_of
from ir.text import ParseError, parse, print_op
from ir.verify import VerifyError, verify
from passes.base import Pass
from passes.page_kv import PageKv
from runtime.artifact import Artifact

ASSUMED_CONTEXT = 2048  # of a model that names none, to see what else it is refused for
CONFIG_FIELDS = (
    "model_type", "num_hidden_layers", "n_layer", "hidden_size", "n_embd", "intermediate_size", "n_inner",
    "hidden_act", "hidden_activation", "activation_function", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings", "n_positions",
    "sliding_window", "layer_types", "attn_logit_softcapping", "final_logit_softcapping", "rope_theta",
    "rope_scaling", "rope_parameters", "num_experts", "num_local_experts", "num_experts_per_tok",
    "tie_word_embeddings", "dtype", "torch_dtype",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """As for a compile: dtype and block of the KV cache, the longest sequence. layer: the one to detail."""

    dtype: str = "f32"
    max_context: int | None = None
    block: int = 16
    layer: int | None = None


def explain(source: Any, asked: Asked, progress: Progress | None = None) -> Explanation:
    """See compiler.explain."""
    check_options(Options(dtype=asked.dtype, max_context=asked.max_context, block=asked.block))
    watched, path = Trace(progress or Progress()), Path(source) if isinstance(source, str | Path) else None
    if path is not None and (path / "manifest.json").is_file():
        found = _of_artifact(path, watched)
    elif path is not None and path.suffix == ".ir":
        found = _of_text(path, asked, watched)
    else:
        found = _of_model(source, asked, watched)
    return replace(found, details=_details(asked.layer, found, watched))


def _of_model(source: Any, asked: Asked, watched: Trace) -> Explanation:
    name = Path(source).name if isinstance(source, str | Path) else type(source).__name__
    config = _config(source)
    model = Model(name, str(source) if isinstance(source, str | Path) else "in memory", "", config=config)
    watched.stage("import")
    try:
        imported = _imported(source, asked)
    except CompileError as error:
        reached = error.reached if isinstance(error, ImportRefused) else None
        if reached is None and not config:
            raise  # there is nothing to show beside it
        if reached is not None:
            watched.run_as_far_as_possible(reached, _before_paging(asked))
        return watched.explanation(replace(model, dtype=asked.dtype), _refusal(error))
    watched.lines = imported.lines
    refused = watched.run(imported.graph, pipeline(asked.dtype, asked.block, weight_reader(imported), ()))
    return watched.explanation(_model(model, imported, asked.dtype), refused)


def _imported(source: Any, asked: Asked) -> Imported:
    """As for a compile. Where that ends before there is a graph (weights of another layout, no context named)
    and the graph would be refused too, the graph's is the reason."""
    try:
        return importers.load(source, max_context=asked.max_context, weights=_has_weights(source))
    except CompileError as error:
        if not (isinstance(source, str | Path) and Path(source).is_dir()) or getattr(error, "op", ""):
            raise
        _check_graph(source, asked)
        raise


def _check_graph(source: Any, asked: Asked) -> None:
    """Raises ImportRefused where it is something in the model that is refused, and not in its files."""
    try:
        importers.load(source, max_context=asked.max_context or ASSUMED_CONTEXT, weights=False)
    except CompileError as error:
        if not error.where.startswith(str(source)):
            raise


def _refusal(error: CompileError) -> Refusal:
    """An import's: at an op, or as to the whole model."""
    if isinstance(error, ImportRefused) and error.op:
        return Refusal("import", error.what, error.todo, error.op, error.module, error.source_line)
    return Refusal("import", error.what, error.todo, where=error.where)


def _before_paging(asked: Asked) -> list[Pass]:
    return list(takewhile(lambda each: not isinstance(each, PageKv), pipeline(asked.dtype, asked.block)))


def _has_weights(source: Any) -> bool:
    """False for a directory that holds a configuration alone."""
    if not isinstance(source, str | Path) or not Path(source).is_dir():
        return True
    return any(Path(source).glob("*.safetensors*"))


def _config(source: Any) -> dict[str, Any]:
    """The fields of a directory's config.json that say what kind of model it is, as far as it has them."""
    if not isinstance(source, str | Path) or not Path(source).is_dir():
        return {}
    try:
        check_links(Path(source))
        raw = json.loads(read_file(Path(source) / "config.json", MAX_CONFIG_BYTES))
    except (CompileError, ValueError, RecursionError, OSError):
        return {}  # the importer says what is wrong with it
    if not isinstance(raw, dict):
        return {}
    return {field: raw[field] for field in CONFIG_FIELDS if raw.get(field) is not None}


def _model(model: Model, imported: Imported, dtype: str) -> Model:
    info, constants = imported.info, set(imported.constants)
    weights = [w for w in imported.graph.weights if w.name not in constants]
    tied = {n: m for n, m in tied_weights(imported.graph).items() if n not in constants}
    stored: Counter[str] = Counter()
    for weight in weights if info.source_files != ("config.json",) else ():
        stored[str(imported.weights.type(weight.name).dtype)] += _size(weight)
    return replace(
        model,
        name=info.name,
        kind=info.source_kind,
        parameters=sum(map(_size, weights)),
        weights=len(weights),
        tied=tied,
        stored=dict(stored),
        dtype=dtype,
        vocab_size=info.vocab_size,
        max_context=info.max_context,
        frozen=info.frozen,
    )


def _size(weight: Any) -> int:
    return math.prod(int(n) for n in tensor_of(weight).shape)  # type: ignore[arg-type]


def _of_artifact(path: Path, watched: Trace) -> Explanation:
    """What was recorded: the graph that the first target's kernels run."""
    artifact = Artifact.open(path, verify="fast")
    manifest = artifact.manifest
    target = next(iter(manifest.targets.values()))
    watched.look(_parsed(artifact.read(target.graph).decode(), f"{path}/{target.graph}"))
    model = Model(
        manifest.name,
        str(path),
        "artifact",
        dtype=manifest.model.dtype,
        vocab_size=manifest.model.vocab_size,
        max_context=manifest.model.max_context,
        frozen=manifest.raw["model"].get("frozen", {}),
    )
    return watched.explanation(_with_weights(model, watched.last), None)


def _of_text(path: Path, asked: Asked, watched: Trace) -> Explanation:
    """A graph's text: passed through the pipeline if it has a sequence length, else as it is."""
    if path.exists() and not is_file(path):  # a pipe may have no end
        todo = "Give a graph's text, as octavo compile --dump-ir writes it"
        raise CompileError("not a file", where=str(path), todo=todo)
    graph = _parsed(path.read_text("utf-8", errors="replace"), str(path))
    model = Model(
        graph.name, str(path), "graph", dtype=asked.dtype, max_context=graph.dims.get("S", (0, 0))[1]
    )
    refused = None
    if "S" in graph.dims:
        refused = watched.run(graph, pipeline(asked.dtype, asked.block, None, ()))
    else:
        watched.look(graph)
    return watched.explanation(_with_weights(model, graph), refused)


def _with_weights(model: Model, graph: Graph | None) -> Model:
    if graph is None:
        return model
    return replace(model, weights=len(graph.weights), tied=tied_weights(graph))


def _parsed(text: str, where: str) -> Graph:
    try:
        graph = parse(text)
        verify(graph)
    except (ParseError, VerifyError) as error:
        raise CompileError(
            str(error), where=where, todo="Write graphs with octavo compile --dump-ir"
        ) from error
    return graph


def _details(layer: int | None, found: Explanation, watched: Trace) -> tuple[Detail, ...]:
    if layer is None or watched.first is None or watched.last is None:
        return ()
    known = keys_of(watched.first)
    before, after = split(watched.first, known), split(watched.last, known)
    chosen = [b for b in found.layers if b.index == layer]
    if not chosen:
        there = sorted({b.index for b in found.layers if b.index is not None})
        raise CompileError(
            f"--layer {layer}: the model has no such layer",
            where=found.model.source,
            todo=f"Choose from {there[0]} to {there[-1]}" if there else "It has no numbered modules",
        )
    keys = [(b.container, b.index) for b in chosen]
    same = watched.first is watched.last
    return tuple(
        Detail(
            each.name,
            () if same else tuple(map(print_op, before.get(key, ()))),
            tuple(map(print_op, after.get(key, ()))),
        )
        for each, key in zip(chosen, keys, strict=True)
    )
