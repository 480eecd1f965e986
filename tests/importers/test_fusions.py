"""What the fusions make of real architectures: every norm, rotation, gate and residual is one op."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from compiler.importers.huggingface import load_directory
from ir.graph import Graph
from ir.interpret import interpret
from ir.verify import verify
from passes.base import Pass
from passes.canonicalize import Canonicalize
from passes.cse import Cse
from passes.dce import Dce
from passes.fold_constants import FoldConstants
from passes.fuse_epilogue import FuseEpilogue
from passes.fuse_norm import FuseNorm
from passes.fuse_rope import FuseRope
from passes.match import shape
from passes.merge_linears import MergeLinears
from tests.model.tiny import CONFIGS, VOCAB, save

WRITTEN_OUT = (
    "rsqrt",
    "sqrt",
    "pow",
    "neg",
    "erf",
    "sigmoid",
    "exp",
    "mean",
    "silu",
    "gelu",
    "gelu_tanh",
    "relu",
)
WITHOUT_ROPE = ("gpt2", "opt")
NORMS_PER_LAYER = {"cohere": 1, "phi": 1, "olmo2": 4, "gemma2": 4, "qwen3": 4}
PARTIAL = {"phi": (32, 8), "gpt_neox": (32, 4), "stablelm": (32, 4)}  # head size, pairs rotated
GATED = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma",
    "gemma2",
    "phi3",
    "olmo2",
    "stablelm",
    "granite",
    "cohere",
)


def steps() -> list[Pass]:
    tidy = [FoldConstants(), Cse(), Dce()]
    fused: list[Pass] = [FuseNorm(), FuseRope(), Cse(), Dce(), MergeLinears(), FuseEpilogue(), *tidy]
    return [Canonicalize(), *tidy, *fused]


def lower(graph: Graph) -> Graph:
    for step in steps():
        graph = step.run(graph).graph
        verify(graph)
    return graph


@pytest.mark.parametrize("name", CONFIGS)
def test_everything_written_out_becomes_one_op(name: str, tmp_path: Path) -> None:
    imported = load_directory(save(name, tmp_path / name))
    graph = lower(imported.graph)
    count = Counter(op.kind for op in graph.ops)
    layers = count["attention"]
    assert not [kind for kind in WRITTEN_OUT if count[kind]]
    assert count["rms_norm"] + count["layer_norm"] == NORMS_PER_LAYER.get(name, 2) * layers + 1
    ropes = [op for op in graph.ops if op.kind == "rope"]
    assert len(ropes) == (0 if name in WITHOUT_ROPE else 2 * layers)
    assert count["cos"] == count["sin"] == min(len(ropes), 1)
    if name in PARTIAL:
        assert {(shape(op.out)[-1], shape(op.args[1])[-1]) for op in ropes} == {PARTIAL[name]}
    assert {bool(op.attr("interleaved")) for op in ropes} <= {name == "cohere"}
    linears = [op for op in graph.ops if op.kind == "linear"]
    assert len(linears) == 4 * layers + 1
    assert sum(bool(op.attr("gated")) for op in linears) == (layers if name in GATED else 0)
    same_logits(imported.graph, graph, imported.weights.read)


def same_logits(before: Graph, after: Graph, read: object) -> None:
    """In float64, so that only a change of meaning can show."""
    ids = np.random.default_rng(0).integers(0, VOCAB, (1, 21)).astype(np.int32)
    inputs = {"ids": ids, "pos": np.arange(21, dtype=np.int32)[None]}
    expected, found = (interpret(g, inputs, read, np.float64).outputs[0] for g in (before, after))  # type: ignore[arg-type]
    assert np.abs(expected - found).max() < 1e-6 * expected.std()
