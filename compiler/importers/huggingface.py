"""A Hugging Face checkpoint directory (config.json and safetensors) -> the IR.

The model class comes from transformers, never from code in the checkpoint. Parameters are on the meta
device: only their shapes are known until weights are packed; buffers (rotary frequencies) are real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from compiler.checkpoint import open_checkpoint
from compiler.importers.aten import SUPPORTED, import_program
from compiler.importers.choose import choose_model
from compiler.importers.configuration import (
    check_config,
    config_context,
    inside,
    read_config,
    read_json,
    token_ids,
)
from compiler.importers.constants import constants_kept
from compiler.importers.converted import ConvertedSource
from compiler.importers.experts import expert_markers
from compiler.importers.export import EXAMPLE_LENGTH, export_program, quiet
from compiler.importers.freeze import divide_frequencies, freeze_picks, freeze_rope
from compiler.importers.markers import NAME, attention_markers, attention_modules, one_sequence
from compiler.importers.model import Imported, ModelInfo
from compiler.importers.own_grids import OwnGrids, check_readers, own_grids
from compiler.importers.placeholders import Names, constants_of, program_of
from compiler.importers.quantized.detect import quantized_source
from compiler.importers.quantized.keep import keep_grids
from compiler.importers.quantized.source import PartSource, QuantizedSource
from compiler.importers.recurrences import recurrence_markers
from compiler.importers.refused import ImportRefused
from compiler.importers.tokenizer import tokenizer_files
from compiler.weights import LayeredSource, ShapeSource, WeightSource, check_weights
from ir.graph import Graph, tensor_of


def load_directory(
    directory: Path, max_context: int | None = None, *, weights: bool = True, keep_grid: bool = False
) -> Imported:
    """Import a checkpoint directory. weights: False for shapes alone. keep_grid: leave quantised matrices as
    they are. Raises ImportRefused or WeightError.
    """
    check_config(directory)  # what can be refused before transformers, which takes seconds, is imported
    found, files = open_weights(directory) if weights else (None, (directory / "config.json",))
    config = read_config(directory)
    generation = read_json(directory / "generation_config.json")
    return import_model(
        config,
        found,
        name=directory.name,
        max_context=max_context,
        source=("huggingface", str(directory), tuple(f.name for f in files)),
        eos=token_ids(generation.get("eos_token_id")),
        tokenizer_files=tokenizer_files(directory),
        keep_grid=keep_grid,
    )


def open_weights(directory: Path) -> tuple[WeightSource, tuple[Path, ...]]:
    """The weights of a directory, quantised ones under the names of what they stand for, and their files."""
    source, files = open_checkpoint(directory)
    quantisation = read_json(directory / "config.json", required=True).get("quantization_config")
    return (quantized_source(source, quantisation, str(directory)) if quantisation else source), files


def import_model(
    config: Any,
    weights: WeightSource | None,
    *,
    name: str,
    max_context: int | None,
    source: tuple[str, str, tuple[str, ...]],
    eos: tuple[int, ...] = (),
    bos: int | None = None,
    tokenizer_files: Mapping[str, bytes] | None = None,
    frequency_divisors: Any = None,
    keep_grid: bool = False,
) -> Imported:
    """The graph of a configuration, over the weights of a checkpoint; None: shapes alone.

    frequency_divisors: what the rotary frequencies [D/2] are divided by, beyond the configuration.
    keep_grid: read quantised matrices as codes and scales; otherwise as the floats that they stand for.
    """
    held = weights.names if weights is not None else ()
    where = source[1] if source[0] == "gguf" else f"{source[1]}/config.json"
    model, stored = choose_model(config, held, where)
    config = config.get_text_config(decoder=True)
    context = max_context or config_context(config, where)
    frozen = freeze_rope(model, config, context) | freeze_picks(model, context, where)
    if frequency_divisors is not None:
        divide_frequencies(model, frequency_divisors, source[1])
    names = Names(model, stored.own)
    names.move_buffers(model)
    grids = OwnGrids()
    if isinstance(weights, QuantizedSource):
        converted = ConvertedSource(weights, stored, model, source[1]) if keep_grid else None
        grids = own_grids(model, names, stored, weights, converted)
    if keep_grid and not grids.matrices:
        what = "no weights that are quantised in a way that is kept: there is no grid of its own"
        what = "; ".join((what, *grids.note))
        raise ImportRefused(what, where=source[1], todo="Compile it as floats, or quantise it here")
    lines: dict[str, str] = {}
    graph = export_graph(model, context, name, names, lines)
    constants = constants_of(model, names, graph)
    if weights is None:
        weights = ShapeSource({w.name: tensor_of(w) for w in graph.weights if w.name not in constants.names})
    converted = ConvertedSource(weights, stored, model, source[1])
    layered = LayeredSource((constants, converted, weights), names.renames)
    stored.check_single((w.name for w in graph.weights), source[1])
    check_weights(graph, layered, source[1])
    check_readers(graph, grids, source[1])
    if keep_grid:
        graph, orders = keep_grids(graph, grids.matrices)
        layered = LayeredSource((PartSource(grids.matrices), orders, layered))
    vocab_size = int(graph.outputs[0].type.shape[2])  # type: ignore[union-attr]
    starts = inside(token_ids(getattr(config, "bos_token_id", None)), vocab_size)
    ends = inside((*eos, *token_ids(getattr(config, "eos_token_id", None))), vocab_size)
    used = stored.used((*(w.name for w in graph.weights), *grids.matrices))
    info = ModelInfo(
        name=name,
        vocab_size=vocab_size,
        max_context=context,
        bos_token_id=next(iter(starts), bos),
        eos_token_ids=ends,
        frozen=frozen,
        source_kind=source[0],
        source_path=source[1],
        source_files=source[2],
        unused=tuple(n for n in held if n not in used),
    )
    notes = tuple(grids.note) if keep_grid else ()
    return Imported(graph, layered, info, dict(tokenizer_files or {}), lines, constants.names, notes)


def export_graph(model: Any, context: int, name: str, names: Names, lines: dict[str, str]) -> Graph:
    """The model's graph with one op per attention, or in plain ops where its attention code is its own."""
    with one_sequence(), expert_markers():
        program = _export_marked(model, context)
        if program is None:
            with quiet():
                model.set_attn_implementation("eager")
            with recurrence_markers(model):
                program = _export(model, context)
    return import_program(program_of(program, names, context, name, wrapper="model"), lines)


def _export_marked(model: Any, context: int) -> Any:
    """The export through our attention function; None if not every attention module that ran called it."""
    if not attention_modules(model):
        return None
    with attention_markers(model) as markers, recurrence_markers(model, markers.recurrence):
        try:
            with quiet():
                model.set_attn_implementation(NAME)
            return _export(model, context, markers.complete)
        except KeyError:  # a model with a table of attention classes of its own
            return None


def _export(model: Any, context: int, wanted: Callable[[], bool] = lambda: True) -> Any:
    """None where the trace was not wanted."""
    import torch

    class Logits(torch.nn.Module):
        """ids, pos [1,S] -> logits [1,S,V], without a cache."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Any, pos: Any) -> Any:
            return self.model(input_ids=ids, position_ids=pos, use_cache=False).logits

    device = next(model.parameters()).device
    example = tuple(torch.zeros((1, EXAMPLE_LENGTH), dtype=torch.long, device=device) for _ in range(2))
    with constants_kept():
        return export_program(Logits().eval(), example, context, SUPPORTED, wanted=wanted)
