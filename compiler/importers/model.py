"""What an import gives to the rest of the compiler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compiler.weights import WeightSource
from ir.graph import Graph

MAX_CONTEXT = 2**28  # tokens; what an artifact's manifest may say


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the model that are not in its graph.

    frozen: choices that depend on the sequence length and were made once, for max_context.
    source_kind: "huggingface", "gguf" or "module".
    source_files: the weight files, relative to source_path (to its folder if it is a file).
    unused: stored arrays that the graph does not read.
    """

    name: str
    vocab_size: int
    max_context: int
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    frozen: Mapping[str, str] = field(default_factory=dict)
    source_kind: str = "module"
    source_path: str = ""
    source_files: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


@dataclass(frozen=True)
class Imported:
    """A model: its graph in imported form, its weights by the graph's names, and its tokenizer's files.

    lines: the line of the model's source that each value of the graph comes from, by name, where known.
    constants: the graph's weights that are no parameters: buffers, and arrays that the model computes.
    notes: what to tell of how it was read, a line each.
    """

    graph: Graph
    weights: WeightSource
    info: ModelInfo
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
