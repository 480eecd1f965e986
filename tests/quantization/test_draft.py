"""A draft beside the model that it is of: the cache's grids are the model's, all else is its own."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiler.errors import CompileError
from compiler.progress import Progress
from compiler.quantization import decide
from compiler.quantization.draft import DraftQuantizer, check_imported, draft_quantization
from compiler.quantization.options import Quantization
from compiler.quantization.step import Quantizer
from compiler.quantization.store import Store
from ir.graph import Graph, Op, Weight
from ir.ops.quantize import dequantize
from ir.types import KV, DType, Tensor
from tests.quantization.made import imported, paged


@pytest.fixture(autouse=True)
def short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decide, "HELD_OUT_TOKENS", 96)


def decided(folder: Path, asked: Quantization) -> tuple[Quantizer, DraftQuantizer]:
    model = imported()
    first = Quantizer(asked.resolved(["cpu"]), model, Store(folder / "model"), Progress())
    of_draft = draft_quantization(asked)
    second = DraftQuantizer(of_draft, model, Store(folder / "draft"), Progress(), first)
    for each in (first, second):
        each.decide(paged(model), lambda name: None, weights=True)
    return first, second


def states(graph: Graph) -> list[KV]:
    return [v.type for v in graph.inputs if isinstance(v.type, KV)]


@pytest.mark.parametrize("weights", ["none", "int8"])
def test_the_cache_has_one_format_and_one_grid(tmp_path: Path, weights: str) -> None:
    model, draft = decided(tmp_path, Quantization(weights, kv="int8", max_kl=100.0))
    assert draft.decided.keys == model.decided.keys and len(model.decided.keys) == 2
    assert states(draft.quantized) == states(model.quantized)
    assert all(s.dtype is DType.I8 for state in states(draft.quantized) for s in state.streams)
    for grid in draft.decided.keys.values():
        assert np.array_equal(draft.read(grid.scale.name), model.read(grid.scale.name))
        assert grid.scale.name in draft.imported().weights.names


def test_weights_are_its_own_also_where_the_models_have_their_names(tmp_path: Path) -> None:
    model, draft = decided(tmp_path, Quantization("int8", max_kl=100.0))
    plain = imported().weights
    codes = draft.decided.weights.calibrated
    assert codes.keys() == model.decided.weights.calibrated.keys() and codes
    for name, found in codes.items():
        assert found.q.type == Tensor(DType.U4, found.q.type.shape)  # type: ignore[union-attr]
        assert found.offset is not None and found.zero == 0
        q, scale, offset = (draft.read(part.name) for part in (found.q, found.scale, found.offset))
        values = dequantize(q, scale, None, offset, 32)
        if name in plain.names:
            error = values - plain.read(name)
            assert 0.01 < np.sqrt(np.square(error).mean() / np.square(plain.read(name)).mean()) < 0.3
        packed = draft.imported().weights
        assert np.array_equal(packed.read(found.q.name), draft.read(found.q.name))
        assert not np.array_equal(model.read(found.q.name), draft.read(found.q.name))


def test_it_is_measured_beside_the_quantised_model_and_never_refused(tmp_path: Path) -> None:
    model, draft = decided(tmp_path, Quantization("int8", max_kl=100.0))
    error = draft.entry()["error"]
    assert error["mean_kl"] > model.entry()["error"]["mean_kl"] > 0  # type: ignore[index]
    assert 0 < error["top1_agreement"] <= 1 and error["positions"] == 48
    same = DraftQuantizer(draft.asked, imported(), Store(tmp_path / "same"), Progress(), draft)
    same.decide(paged(imported()), lambda name: None, weights=True)
    assert same.entry()["error"]["mean_kl"] == 0 and same.entry()["error"]["top1_agreement"] == 1


@pytest.mark.parametrize(("dtype", "refused"), [(DType.U4, True), (DType.I8, False)])
def test_codes_of_four_bits_are_as_small_as_a_draft(dtype: DType, refused: bool) -> None:
    model = imported()
    codes = Op("dequantize", (Weight("q", Tensor(dtype, (64, 64))),), {}, model.graph.ops[0].outs)
    given = replace(model, graph=replace(model.graph, ops=(codes, *model.graph.ops[1:])))
    with pytest.raises(CompileError, match="own codes are int4") if refused else nullcontext():
        check_imported(given, "self:int4")


@pytest.mark.parametrize("weights", ["none", "int8", "fp8"])
def test_it_is_fitted_unless_another_algorithm_was_given(tmp_path: Path, weights: str) -> None:
    _, draft = decided(tmp_path, Quantization(weights))
    assert draft.entry()["algorithm"] == "gptq"
