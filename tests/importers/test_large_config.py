"""A configuration of a large model, without weights: a layer becomes few ops, whatever its sizes."""

from __future__ import annotations

import json
from pathlib import Path

from lowering import LLAMA_8B, MAX_OPS

from compiler.importers import load
from compiler.pipeline import pipeline, run_pipeline
from ir.graph import Graph


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
