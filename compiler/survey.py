"""What a checkpoint holds, read from its headers alone, in well under a second and without torch.

It serves to say beforehand what a compile will take. Nothing is refused here: of what cannot be read, nothing
is known, and the import says what is wrong with it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from compiler.checkpoint import open_checkpoint
from compiler.errors import CompileError
from compiler.files import MAX_CONFIG_BYTES, check_links, is_file, read_file
from compiler.importers.gguf_header import read_header
from compiler.importers.onnx.beside import context_beside
from compiler.importers.onnx.find import onnx_file
from compiler.importers.onnx.model_file import read_model
from compiler.importers.onnx.tensors import stored_tensors
from compiler.importers.quantized.detect import quantized_source
from compiler.weights import WeightSource

POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "seq_length")


@dataclass(frozen=True)
class Survey:
    """kind: huggingface, gguf, onnx, module, shapes, or unknown. num_bytes: of the files of weights. counts:
    of elements of each tensor; empty where there are shapes alone. max_context: the model's own; None where
    it is not known.
    """

    kind: str
    num_bytes: int = 0
    counts: Sequence[int] = ()
    max_context: int | None = None

    @property
    def num_weights(self) -> int:
        return sum(self.counts)


def survey(source: Any, *, weights: bool = True) -> Survey:
    """source: as compiler.compile takes it. weights: False for shapes alone."""
    if not isinstance(source, str | Path):
        if not hasattr(source, "parameters"):
            return Survey("unknown")
        return Survey("module", counts=[int(p.numel()) for p in source.parameters()])
    path = Path(source)
    with suppress(CompileError, OSError, ValueError, RecursionError, TypeError, AttributeError):
        if (model := onnx_file(path)) is not None:
            return _onnx(model)
        if path.is_dir():
            return _directory(path, weights)
        if path.suffix == ".gguf" and is_file(path):
            return _gguf(path)
    return Survey("unknown")


def _directory(path: Path, weights: bool) -> Survey:
    context = _context(path / "config.json")
    if not weights:
        return Survey("shapes", max_context=context)
    source, files = _open_weights(path)
    counts = [prod(int(n) for n in source.type(name).shape) for name in source.names]
    return Survey("huggingface", sum(f.stat().st_size for f in files), counts, context)


def _open_weights(path: Path) -> tuple[WeightSource, tuple[Path, ...]]:
    """The weights of a directory, quantised ones under the names of what they stand for."""
    source, files = open_checkpoint(path)
    config = json.loads(read_file(path / "config.json", MAX_CONFIG_BYTES)).get("quantization_config")
    return (quantized_source(source, config, str(path)) if config else source), files


def _context(config: Path) -> int | None:
    check_links(config.parent)
    found = json.loads(read_file(config, MAX_CONFIG_BYTES))
    found = {**found, **(found.get("text_config") or {})}
    return next((found[key] for key in POSITIONS if isinstance(found.get(key), int)), None)


def _onnx(path: Path) -> Survey:
    stored = stored_tensors(read_model(path).graph.initializer, path)
    files = {path, *(each.path for each in stored if each.path is not None)}
    counts = [prod(int(n) for n in each.type.shape) for each in stored]
    return Survey("onnx", sum(f.stat().st_size for f in files), counts, context_beside(path))


def _gguf(path: Path) -> Survey:
    header = read_header(path)
    lengths = (value for key, value in header.keys.items() if key.endswith(".context_length"))
    context = next((length for length in lengths if isinstance(length, int)), None)
    return Survey("gguf", path.stat().st_size, [prod(t.shape) for t in header.tensors], context)
