"""What other people's exporters write of four models gives onnxruntime's logits, each token forced."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.errors import CompileError
from compiler.importers import load
from compiler.pipeline import pipeline, run_pipeline
from compiler.weights import read_as
from ir.predicates import CAUSAL, window
from tests.importers.onnx.graphs import before_paging, run

DATA = Path(__file__).parents[2] / "data" / "onnx"
TOLERANCE = 1e-4  # of the logits' standard deviation
CONTEXT, LAYERS, WINDOW = 64, 2, 8
OPSETS = ("dynamo18", "dynamo21", "dynamo23", "dynamo24")
PAST = ("dynamo18-past", "dynamo23-past", "legacy-past")
BUILT = ("genai-fp32", "genai-int4")
FORMS = [
    *((model, form) for model in ("llama", "qwen3", "gemma2") for form in (*OPSETS, *PAST, *BUILT)),
    *(("gpt2", form) for form in (*OPSETS, *PAST)),
    ("llama", "genai-int8"),
    ("llama", "genai-mha"),
]


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("onnx")
    for archive in DATA.glob("*.tar.xz"):
        with tarfile.open(archive) as tar:
            tar.extractall(root / archive.name.removesuffix(".tar.xz"), filter="data")
    return root


def _error(imported: Any, folder: Path, passes: Any = ()) -> float:
    own = folder / "logits.npy"
    expected = np.load(own if own.exists() else folder.parent / "logits.npy")
    found = run(imported, np.load(folder.parent / "ids.npy"), passes)[0]
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / expected.std())


@pytest.mark.parametrize(("model", "form"), FORMS)
def test_logits_are_those_of_onnxruntime(unpacked: Path, model: str, form: str) -> None:
    """Of the graph with attention, norms and rotary embedding recognised; it is lowered as any model's is."""
    folder = unpacked / model / form
    imported = load(folder / "model.onnx", max_context=CONTEXT)
    assert _error(imported, folder, before_paging(imported)) <= TOLERANCE
    weights = {w.name: w for w in imported.graph.weights}
    graph = run_pipeline(imported.graph, pipeline(read=lambda n: read_as(imported.weights, weights[n])))
    found = [op for op in graph.ops if op.kind == "paged_attention"]
    masks = [CAUSAL & window(WINDOW), CAUSAL] if model == "gemma2" else [CAUSAL] * LAYERS
    assert [op.attr("mask") for op in found] == masks
    kinds = [op.kind for op in graph.ops]
    assert kinds.count("rope") == (0 if model == "gpt2" else 2 * LAYERS)
    assert "softmax" not in kinds and "matmul" not in kinds


@pytest.mark.parametrize("form", ["genai-int4", "genai-int8"])
def test_a_grid_of_its_own_is_kept(unpacked: Path, form: str) -> None:
    folder = unpacked / "llama" / form
    imported = load(folder / "model.onnx", keep_grid=True, max_context=CONTEXT)
    assert _error(imported, folder) <= TOLERANCE
    graph = run_pipeline(imported.graph, pipeline())
    kinds = [op.kind for op in graph.ops]
    assert "linear" not in kinds and "embed" in kinds  # cos and sin
    assert kinds.count("qlinear") >= 4 * LAYERS + 1


def test_tokenizer_and_configuration_beside_the_file_are_used(unpacked: Path) -> None:
    info = load(unpacked / "llama" / "genai-int4").info
    assert (info.max_context, info.bos_token_id, info.eos_token_ids) == (CONTEXT, 1, (2,))
    assert "tokenizer.json" in load(unpacked / "llama" / "genai-int4").tokenizer_files
    with pytest.raises(CompileError, match="--max-context"):
        load(unpacked / "llama" / "dynamo23")


@pytest.mark.parametrize("change", ["mask", "rope", "heads"])
def test_a_changed_graph_gives_other_logits(unpacked: Path, change: str, tmp_path: Path) -> None:
    """So that what is compared above can fail."""
    import onnx

    folder = unpacked / "llama" / "dynamo23"
    model = onnx.load(folder / "model.onnx")
    node = next(
        n for n in model.graph.node if n.op_type == ("RotaryEmbedding" if change == "rope" else "Attention")
    )
    if change == "rope":
        node.attribute[0].i = 1 - node.attribute[0].i
    elif change == "heads":
        node.input[1], node.input[2] = node.input[2], node.input[1]
    else:
        next(n for n in model.graph.node if n.op_type == "LessOrEqual").op_type = "Less"
    onnx.save(model, tmp_path / "model.onnx")
    imported = load(tmp_path / "model.onnx", max_context=CONTEXT)
    for name in ("ids.npy", "logits.npy"):
        (tmp_path.parent / name).write_bytes((folder.parent / name).read_bytes())
    assert not _error(imported, tmp_path) <= 100 * TOLERANCE
