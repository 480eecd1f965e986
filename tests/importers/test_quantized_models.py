"""Models whose checkpoints come quantised compute with the numbers that are stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from safetensors.torch import load_file, save_file

from compiler.errors import CompileError
from compiler.importers import Imported, ImportRefused, load
from compiler.importers.quantized.keep import keep_grids
from compiler.importers.quantized.source import PartSource
from compiler.pipeline import pipeline, run_pipeline
from compiler.quantization.decide import Decision
from compiler.quantization.options import Quantization
from compiler.quantization.store import Store
from compiler.survey import survey
from compiler.weights import ArraySource, LayeredSource
from ir.build import GraphBuilder
from ir.graph import Graph, Weight
from ir.interpret import interpret
from ir.types import DType, Tensor
from tests.importers import test_gguf, test_quantized
from tests.importers.compare import TOLERANCE, worst
from tests.model import tiny

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False}


def words(codes: Any) -> Any:
    """Eight codes of each row [R, n] in an i32, the first in the lowest bits: [R, n/8]."""
    parts = codes.astype(np.uint32).reshape(len(codes), -1, 8) << (4 * np.arange(8, dtype=np.uint32))
    return np.bitwise_or.reduce(parts, -1).view(np.int32)


def gptq(module: str, shape: tuple[int, ...]) -> tuple[dict[str, Any], Any]:
    """(what GPTQ stores of a linear of random codes, what it stands for), by act-order in layer 1."""
    rng, groups = np.random.default_rng(len(module)), np.arange(shape[1]) // 32
    groups = np.random.default_rng(shape[1]).permutation(groups) if ".1." in module else groups
    codes, zeros = rng.integers(0, 16, shape), rng.integers(1, 16, (shape[0], groups.max() + 1))
    scales = rng.uniform(0.005, 0.02, zeros.shape).astype(np.float16)
    stored = {"qweight": words(codes).T, "qzeros": words(zeros.T - 1), "scales": scales.T, "g_idx": groups}
    weight = (codes - zeros[:, groups]) * scales.astype(np.float32)[:, groups]
    tensors = {f"{module}.{part}": torch.from_numpy(a.copy()) for part, a in stored.items()}
    return tensors, torch.from_numpy(weight.astype(np.float32))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A directory with GPTQ's codes of every linear of the layers, and the model of floats."""
    folder, model = tmp_path_factory.mktemp("gptq"), tiny.build("llama")
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [n for n in tensors if "_proj.weight" in n]:
        module, weight = name.removesuffix(".weight"), tensors.pop(name)
        stored, meant = gptq(module, tuple(weight.shape))
        tensors |= {
            n: a.to(torch.int32) if n.endswith("g_idx") else a.contiguous() for n, a in stored.items()
        }
        model.get_submodule(module).weight.data = meant
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": GPTQ}))
    return folder, model


@pytest.fixture(scope="module")
def kept(checkpoint: tuple[Path, Any]) -> Imported:
    return load(checkpoint[0], keep_grid=True)


def kinds(graph: Graph) -> list[str]:
    return [op.kind for op in graph.ops]


def test_logits_are_those_of_the_floats_that_codes_stand_for(checkpoint: Any, kept: Imported) -> None:
    assert max(worst(kept, checkpoint[1], length, tiny.VOCAB) for length in (1, 17)) <= TOLERANCE
    assert kinds(kept.graph).count("dequantize") == 14 and kept.info.unused == ()


def test_a_graph_of_floats_has_the_same_weights(checkpoint: Any) -> None:
    imported = load(checkpoint[0])
    assert "dequantize" not in kinds(imported.graph)
    state = checkpoint[1].state_dict()
    for weight in imported.graph.weights:
        if weight.name in state:
            assert np.array_equal(imported.weights.read(weight.name), state[weight.name].numpy()), weight.name


def test_passes_leave_the_codes_to_linears(kept: Imported) -> None:
    """Query, key and value are one, gate and up are another: four linears for each of two layers.

    Where columns are in another order, those that are one read an input that is put into it once.
    """
    lowered = run_pipeline(kept.graph, pipeline())
    assert kinds(lowered).count("take") == 4
    assert kinds(lowered).count("qlinear") == 8 and kinds(lowered).count("linear") == 1
    assert "dequantize" not in kinds(lowered)
    codes = [w for w in lowered.weights if w.name.endswith("proj.weight.q")]
    assert len(codes) == 14 and {w.type.dtype for w in codes if isinstance(w.type, Tensor)} == {DType.U4}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_of_a_kept_grid_that_are_not_finite_are_refused_by_name(
    kept: Imported, tmp_path: Path, value: float
) -> None:
    passes = pipeline(read=kept.weights.read)
    graph = run_pipeline(kept.graph, passes[: [p.name for p in passes].index("quantize_weights")])
    name = next(w.name for w in graph.weights if w.name.endswith("layers.1.mlp.up_proj.weight.scale"))
    scale = np.array(kept.weights.read(name))
    scale[5, 1] = value
    broken = replace(kept, weights=LayeredSource([ArraySource({name: scale}), kept.weights]))
    asked = Quantization("own").resolved(["cpu"])
    Decision(asked, graph, kept, Store(tmp_path)).first()
    with pytest.raises(CompileError, match=f"tensor '{name}': 1 of 336 numbers are NaN or infinite"):
        Decision(asked, graph, broken, Store(tmp_path)).first()


def test_a_survey_counts_the_weights_that_codes_stand_for(checkpoint: Any) -> None:
    folder, model = checkpoint
    assert survey(folder).num_weights == sum(p.numel() for p in model.parameters())
    assert survey(folder).kind == "huggingface"


def test_a_gguf_file_keeps_its_grid_whatever_the_order_of_rows(tmp_path: Path) -> None:
    """One of a tied table, which is stored once."""
    path = test_gguf.write(tmp_path / "m.gguf", test_gguf.stored(test_gguf.build(tied=True)), Quant.Q4_1)
    model, imported = test_gguf.made_by_transformers(path), load(path, keep_grid=True)
    assert max(worst(imported, model, length, test_gguf.VOCAB) for length in (1, 33)) <= TOLERANCE
    assert kinds(imported.graph).count("dequantize") == 2 * 7 + 1
    assert {w.type.dtype for w in imported.graph.weights if w.name.endswith(".q")} == {DType.U4}  # type: ignore


def test_a_module_with_another_layout_is_refused(tmp_path: Path) -> None:
    """GPT-2's matrices are [K, N], and this one is square."""
    tiny.save("gpt2", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = next(n for n in tensors if n.endswith("h.0.attn.c_proj.weight"))
    del tensors[name]
    stored, _ = gptq(name.removesuffix(".weight"), (96, 96))
    tensors |= {n: a.to(torch.int32) if n.endswith("g_idx") else a.contiguous() for n, a in stored.items()}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": GPTQ}))
    with pytest.raises(ImportRefused, match="attn.c_proj.weight': a quantised matrix of a Conv1D"):
        load(tmp_path)


def test_a_checkpoint_without_a_grid_cannot_keep_it(tmp_path: Path) -> None:
    path = test_gguf.write(tmp_path / "m.gguf", test_gguf.stored(test_gguf.build()), Quant.F16)
    with pytest.raises(ImportRefused, match="m.gguf: no weights that are quantised"):
        load(path, keep_grid=True)
    for source, options in ((path.parent, {"weights": False}), (torch.nn.Linear(2, 2), {})):
        with pytest.raises(ImportRefused, match="own weights have a grid to keep"):
            load(source, keep_grid=True, **options)


def test_act_order_moves_the_input_of_linears_once_and_the_columns_of_tables_back() -> None:
    build = GraphBuilder("g", {}, ())
    x, ids = build.input("x", Tensor(DType.F32, (5, 96))), build.input("ids", Tensor(DType.I32, (5,)))
    first, second = (Weight(f"{n}.weight", Tensor(DType.F32, (32, 96))) for n in "ab")
    made = [build.op("linear", x, first), build.op("linear", x, second), build.op("embed", ids, first)]
    graph = build.graph([build.op("concat", *made, axis=1)])
    matrices = dict.fromkeys(("a.weight", "b.weight"), test_quantized.matrix("gptq-4-order"))
    kept, orders = keep_grids(graph, matrices)
    assert kinds(kept) == ["take", "dequantize", "linear", "dequantize", "linear", "take", "embed", "concat"]
    weight, rng = test_quantized.expected("gptq-4-order"), np.random.default_rng(0)
    given = {"x": rng.normal(size=(5, 96)).astype(np.float32), "ids": rng.integers(0, 32, 5, np.int32)}
    source = LayeredSource((orders, PartSource(matrices)))
    found = interpret(kept, given, {w.name: source.read(w.name) for w in kept.weights}).outputs[0]
    y = given["x"].astype(np.float64) @ weight.astype(np.float64).T
    np.testing.assert_allclose(found[:, :64], np.concatenate([y, y], 1), atol=1e-5)
    assert np.array_equal(found[:, 64:], weight[given["ids"]])
