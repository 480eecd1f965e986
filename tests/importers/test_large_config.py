"""A configuration of a large model, without weights: a layer becomes few ops, whatever its sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from compiler.importers import load
from compiler.pipeline import pipeline, run_pipeline
from ir.graph import Graph

MAX_OPS = 24  # of a layer, those that reshape and those of weights too
LLAMA_8B: dict[str, Any] = dict(
    model_type="llama",
    hidden_size=4096,
    intermediate_size=14336,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
    rope_theta=500000.0,
    tie_word_embeddings=False,
)


def lowered(directory: Path, num_layers: int) -> Graph:
    (directory / "config.json").write_text(json.dumps(LLAMA_8B | {"num_hidden_layers": num_layers}))
    return run_pipeline(load(directory, weights=False).graph, pipeline())


def test_a_layer_becomes_few_ops(tmp_path: Path) -> None:
    few, more = (lowered(tmp_path, n) for n in (2, 4))
    per_layer = (len(more.ops) - len(few.ops)) / 2
    assert 10 < per_layer <= MAX_OPS
    kinds = [op.kind for op in more.ops]
    assert kinds.count("paged_attention") == 4 and kinds.count("rms_norm") == 9
    assert kinds.count("linear") == 4 * 4 + 1 and kinds.count("rope") == 8
