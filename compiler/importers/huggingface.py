"""A Hugging Face checkpoint directory (config.json and safetensors) -> the IR.

The model class comes from transformers, never from code in the checkpoint. Parameters are on the meta
device: only their shapes are known until weights are packed; buffers (rotary frequencies) are real.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from compiler.checkpoint import open_checkpoint
from compiler.files import MAX_CONFIG_BYTES, MAX_TOKENIZER_BYTES, check_links, read_file
from compiler.importers.aten import SUPPORTED, import_program
from compiler.importers.config_limits import check_numbers
from compiler.importers.constants import constants_kept
from compiler.importers.export import EXAMPLE_LENGTH, export_program, quiet
from compiler.importers.freeze import divide_frequencies, freeze_rope
from compiler.importers.markers import NAME, attention_markers, one_sequence
from compiler.importers.model import MAX_CONTEXT, Imported, ModelInfo
from compiler.importers.placeholders import Names, constants_of, program_of
from compiler.importers.quantized.detect import check_method, quantized_source
from compiler.importers.quantized.keep import keep_grids
from compiler.importers.quantized.matrix import Matrix
from compiler.importers.quantized.source import PartSource, QuantizedSource
from compiler.importers.quantized.stored import ORIGINAL
from compiler.importers.refused import ImportRefused, one_line
from compiler.weights import LayeredSource, ShapeSource, WeightSource, check_weights
from ir.graph import Graph, tensor_of
from runtime.errors import shorten

CHECK = "Check its fields, and that transformers is new enough for the model"

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
    "seq_length",
)


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


def check_config(directory: Path) -> None:
    """Raises ImportRefused on remote code, and on weights that are quantised in a way that is not read."""
    check_links(directory)
    raw = read_json(directory / "config.json", required=True)
    if raw.get("auto_map"):
        raise ImportRefused(
            "the checkpoint brings its own model code (auto_map), which is never run",
            where=f"{directory}/config.json",
            todo="If transformers has the model type itself, remove auto_map from a copy of config.json",
        )
    if raw.get("quantization_config"):
        check_method(raw["quantization_config"], f"{directory}/config.json")
    check_numbers(raw, f"{directory}/config.json")


def read_config(directory: Path) -> Any:
    """The configuration of a checkpoint. Raises ImportRefused on remote code and unknown model types."""
    check_config(directory)
    from transformers import AutoConfig

    with quiet():
        try:
            config: Any = AutoConfig.from_pretrained(
                str(directory), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # whatever a wrong field makes of the many configuration classes
            what = f"transformers does not know this model: {one_line(error)}"
            raise ImportRefused(what, where=f"{directory}/config.json", todo=CHECK) from error
    if hasattr(config, "quantization_config"):  # the model is made as if it was not: weights are read here
        del config.quantization_config
    return config


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
    frozen = freeze_rope(model, config, context)
    if frequency_divisors is not None:
        divide_frequencies(model, frequency_divisors, source[1])
    names = Names(model, stored)
    names.move_buffers(model)
    matrices = {}
    if isinstance(weights, QuantizedSource):
        matrices = quantized_matrices(model, names, weights, source[1])
    if keep_grid and not matrices:
        what = "no weights that are quantised in a way that is kept: there is no grid of its own"
        raise ImportRefused(what, where=source[1], todo="Compile it as floats, or quantise it here")
    lines: dict[str, str] = {}
    graph = export_graph(model, context, name, names, lines)
    constants = constants_of(model, names, graph)
    if weights is None:
        weights = ShapeSource({w.name: tensor_of(w) for w in graph.weights if w.name not in constants.names})
    layered = LayeredSource((constants, weights), names.renames)
    check_weights(graph, layered, source[1])
    if keep_grid:
        graph, orders = keep_grids(graph, matrices)
        layered = LayeredSource((PartSource(matrices), orders, layered))
    vocab_size = int(graph.outputs[0].type.shape[2])  # type: ignore[union-attr]
    starts = inside(token_ids(config.bos_token_id), vocab_size)
    ends = inside((*eos, *token_ids(config.eos_token_id)), vocab_size)
    used = {names.stored.get(w.name) for w in graph.weights} | {names.stored.get(n) for n in matrices}
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
    return Imported(graph, layered, info, dict(tokenizer_files or {}), lines, constants.names)


def quantized_matrices(model: Any, names: Names, weights: QuantizedSource, where: str) -> dict[str, Matrix]:
    """The quantised matrices by the graph's names of their weights.

    Raises ImportRefused where a module that is no linear and no embedding has one: it may read it in another
    layout.
    """
    import torch

    found: dict[str, Matrix] = {}
    for own, stored in names.stored.items():
        matrix = weights.matrix(stored)
        if matrix is None:
            continue
        module = model.get_submodule(own.rpartition(".")[0])
        if not isinstance(module, torch.nn.Linear | torch.nn.Embedding):
            what = f"a quantised matrix of a {type(module).__name__}; those of Linear and Embedding are read"
            raise ImportRefused(what, where=f"{where}, tensor {stored!r}", todo=ORIGINAL)
        found[names[own]] = matrix
    return found


def choose_model(
    config: Any, stored: tuple[str, ...], where: str = "config.json"
) -> tuple[Any, dict[str, str]]:
    """The causal language model of a configuration, and stored_names of it.

    Of a configuration with several parts it is the text part or the whole, of which text alone is computed:
    the one of which the checkpoint holds more.
    """
    text = config.get_text_config(decoder=True)
    if not hasattr(text, "model_type"):  # transformers takes whatever stands at its place
        todo = "Correct it in a copy of the checkpoint"
        raise ImportRefused("its text_config is not a configuration", where=where, todo=todo)
    parts = [part for part in (text, config) if has_language_model(part)][: 1 if text is config else 2]
    models = [instantiate(part, where) for part in parts or [text]]
    found = [(model, stored_names(model, stored)) for model in models]
    return min(found, key=lambda pair: _num_missing(*pair))


def _num_missing(model: Any, names: Mapping[str, str]) -> int:
    """Parameters that are not stored under any of their names."""
    groups: dict[int, bool] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        groups[id(parameter)] = groups.get(id(parameter), False) or name in names
    return sum(not is_stored for is_stored in groups.values())


def has_language_model(config: Any) -> bool:
    from transformers import AutoModelForCausalLM

    mapping: Any = AutoModelForCausalLM._model_mapping
    return type(config) in mapping


def config_context(config: Any, where: str = "config.json") -> int:
    """The context that a configuration promises. Raises ImportRefused where it promises none."""
    for key in _POSITIONS:
        found = getattr(config, key, None)
        if type(found) is int and 0 < found <= MAX_CONTEXT:  # and not true
            return found
        if type(found) is int and found > MAX_CONTEXT:
            what = f"{key} = {shorten(str(found))}"
            raise ImportRefused(what, where=where, todo="Give a smaller one with --max-context N")
    what = "it has no maximum number of positions"
    raise ImportRefused(what, where=where, todo="Give one with --max-context N")


def instantiate(config: Any, where: str = "config.json") -> Any:
    """The causal language model of a configuration, parameters on the meta device, float32, in eval mode."""
    import torch
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    from compiler.importers.bounded import Bounded

    if not has_language_model(config):
        raise ImportRefused(
            f"transformers has no causal language model for the model type {config.model_type!r}",
            where=where,
            todo="Compile a checkpoint of a decoder-only language model",
        )
    check_numbers(config.to_dict(), where)
    mapping: Any = AutoModelForCausalLM._model_mapping
    make = mapping[type(config)]._from_config
    with quiet(), init_empty_weights(include_buffers=False), Bounded(where):
        try:
            model = make(config, attn_implementation="eager", dtype=torch.float32)
        except ImportRefused:
            raise
        except Exception as error:  # negative or absurd sizes, an unknown activation or rotary type
            what = f"it makes no {config.model_type} model: {one_line(error)}"
            raise ImportRefused(what, where=where, todo=CHECK) from error
    model.tie_weights()  # outside: init_empty_weights gives every assigned parameter a tensor of its own
    return model.eval()


def stored_names(model: Any, stored: Iterable[str]) -> dict[str, str]:
    """From the model's name of each array to the checkpoint's, by transformers' own table of renamings.

    Raises ImportRefused where an array would have to be computed from several stored ones.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    known = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    found: dict[str, str] = {}
    for name in stored:
        own, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if converter is not None and own in known and own != name:
            raise ImportRefused(
                f"it is stored in an older layout, from which {own!r} has to be computed",
                where=f"tensor {name!r}",
                todo="Load the checkpoint with transformers and save_pretrained(OUT, "
                "save_original_format=False)",
            )
        if own in known:  # not a buffer that is computed, which older checkpoints hold too
            found[own] = name
    return found


def export_graph(model: Any, context: int, name: str, names: Names, lines: dict[str, str]) -> Graph:
    """The model's graph with one op per attention, or in plain ops where its attention code is its own."""
    with one_sequence():
        program = _export_marked(model, context)
        if program is None:
            with quiet():
                model.set_attn_implementation("eager")
            program = _export(model, context)
    return import_program(program_of(program, names, context, name, wrapper="model"), lines)


def _export_marked(model: Any, context: int) -> Any:
    """The export through our attention function; None if not every attention module that ran called it."""
    with attention_markers(model) as markers:
        try:
            with quiet():
                model.set_attn_implementation(NAME)
            return _export(model, context, lambda: markers.calls == markers.expected() > 0)
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


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    there = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    found = {name: read_file(directory / name, MAX_TOKENIZER_BYTES) for name in there}
    if "tokenizer.json" in found or not any((directory / n).is_file() for n in _SLOW_TOKENIZERS):
        return found
    return {**found, **convert_tokenizer(directory)}


_SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def convert_tokenizer(directory: Path, **options: Any) -> dict[str, bytes]:
    """The files of a tokenizer as transformers saves its fast form."""
    import tempfile

    from transformers import AutoTokenizer

    with quiet(), tempfile.TemporaryDirectory() as out:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), trust_remote_code=False, local_files_only=True, use_fast=True, **options
            )
            tokenizer.save_pretrained(out)
        except Exception as error:  # whatever the conversion code of the many tokenizers raises
            raise ImportRefused(
                f"transformers cannot convert the tokenizer to tokenizer.json: {one_line(error)}",
                where=str(directory),
                todo="Add a tokenizer.json, or remove the tokenizer's files: prompts are token ids then",
            ) from error
        return {n: (Path(out) / n).read_bytes() for n in TOKENIZER_FILES if (Path(out) / n).is_file()}


def inside(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Those that are tokens, each once. Others, often a configuration class's defaults, never occur."""
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    values: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
    found = tuple(v for v in values if v is not None)
    if not all(type(v) is int for v in found):
        raise ImportRefused(
            f"bos_token_id or eos_token_id is {shorten(repr(value))}; they are token ids",
            where="config.json or generation_config.json",
            todo="Correct it in the checkpoint",
        )
    return found


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ImportRefused(
                "it is missing", where=str(path), todo="Give a directory that has one beside its weights"
            )
        return {}
    try:
        found = json.loads(read_file(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        what = f"not valid JSON: {shorten(str(error), 200)}"
        raise ImportRefused(what, where=str(path), todo="Download the checkpoint again") from None
    if not isinstance(found, dict):
        raise ImportRefused("not a JSON object", where=str(path), todo="Download the checkpoint again")
    return found
