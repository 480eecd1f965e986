"""Quantisation of a mixture of experts: what is rounded, kept, said and measured."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from compiler.errors import CompileError
from compiler.importers import Imported, ModelInfo
from compiler.quantization.calibrate import round_experts
from compiler.quantization.gate import logits_of
from compiler.quantization.grid import Grid
from compiler.quantization.options import Quantization
from compiler.quantization.rtn import round_to_nearest
from compiler.quantization.text import Windows
from compiler.weights import ArraySource
from ir.ops.quantize import dequantize, round_weight
from ir.stream import in_place
from ir.types import DType
from tests.compiler.decoder import Decoder
from tests.compiler.moe import Moe
from tests.quantization.made import CONTEXT, VOCAB, decision

MOE = Moe(experts=5, chosen=2)
WIDTH, INNER = MOE.width, MOE.inner
UP, DOWN = "model.layers.{}.moe.experts.up", "model.layers.{}.moe.experts.down"
TEXT = Windows(tuple(np.random.default_rng(i).integers(0, VOCAB, 40, np.int32) for i in range(3)), "made")


def imported(broken: str = "") -> Imported:
    graph = Decoder([None, 8], heads=4, kv_heads=2, size=8, vocab=VOCAB, context=CONTEXT, extra=MOE).graph()
    rng = np.random.default_rng(3)
    arrays = {w.name: rng.normal(size=w.type.shape, scale=0.3).astype(np.float32) for w in graph.weights}  # type: ignore[union-attr]
    for name in arrays:
        arrays[name] += np.float32("norm" in name)
    if broken:
        arrays[broken].flat[-3] = np.nan
    return Imported(graph, ArraySource(arrays), ModelInfo("made", VOCAB, CONTEXT))


def rounded(folder: Path, asked: Quantization) -> dict[str, str]:
    """Of each weight the format that is decided."""
    made = decision(folder, asked, imported())
    found = made.first().formats
    return {use.paths[-1]: found[n] for n, (_, uses) in made.matrices.items() for use in uses}


def test_the_router_is_kept_unless_a_rule_names_it(tmp_path: Path) -> None:
    found = rounded(tmp_path / "a", Quantization("int4", algorithm="rtn"))
    assert found["model.layers.1.moe.gate"] == "none"
    assert decision(tmp_path / "a", Quantization("int4", algorithm="rtn"), imported()).first().nearest == ()
    assert found[UP.format(0)] == found[DOWN.format(1)] == found["model.layers.0.attn.o"] == "int4"
    found = rounded(tmp_path / "b", Quantization("int4", algorithm="rtn", keep=("*.1.moe.gate=int8",)))
    assert found["model.layers.1.moe.gate"] == "int8" and found["model.layers.0.moe.gate"] == "none"


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("*.experts", ["none", "none"]),
        ("*.experts.down=int8", ["int4", "int8"]),
        ("model.layers.0.moe", ["none", "none"]),
    ],
)
def test_rules_name_stacks(tmp_path: Path, rule: str, expected: list[str]) -> None:
    found = rounded(tmp_path, Quantization("int4", algorithm="rtn", keep=(rule,)))
    assert [found[UP.format(0)], found[DOWN.format(0)]] == expected


@pytest.mark.parametrize("algorithm", ["gptq", "awq"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_experts_are_rounded_to_the_nearest_one_by_one(
    tmp_path: Path, algorithm: str, symmetric: bool
) -> None:
    model, notes = imported(), list[str]()
    made = decision(tmp_path, Quantization("int4", algorithm=algorithm, symmetric=symmetric), model)
    made.note = notes.append
    decided = made.first()
    assert decided.nearest == tuple(n.format(i) for i in range(2) for n in (UP, DOWN))
    assert any(f"{algorithm}: 4 stacks of experts are rounded to the nearest" in n for n in notes)
    stack = next(n for n, (_, uses) in made.matrices.items() if uses[0].paths[-1] == DOWN.format(1))
    codes = decided.weights.calibrated[stack]
    grid = made.asked.grid("int4")
    for e, matrix in enumerate(model.weights.read(DOWN.format(1))):
        expected, span = round_to_nearest(matrix, grid), slice(e * WIDTH, (e + 1) * WIDTH)
        np.testing.assert_array_equal(made.store.read(codes.q.name)[span], expected.codes)
        np.testing.assert_array_equal(made.store.read(codes.scale.name)[span], expected.scale)
    assert made.measured(decided, TEXT).measured is not None


def test_a_stack_rounded_is_its_matrices_rounded() -> None:
    w = np.random.default_rng(0).normal(size=(3 * 7, 40)).astype(np.float32)
    for symmetric in (True, False):
        grid = Grid(DType.U4, 32, symmetric)
        np.testing.assert_array_equal(round_experts(w, 3, grid).values(), round_to_nearest(w, grid).values())


@pytest.mark.parametrize("asked", [Quantization("int4"), Quantization("int8", algorithm="rtn")])
def test_an_expert_that_is_not_finite_is_refused_by_name(tmp_path: Path, asked: Quantization) -> None:
    name = UP.format(1)
    with pytest.raises(CompileError, match=f"tensor '{name}': 1 of [0-9,]+ weights are NaN") as refused:
        decision(tmp_path, asked, imported(name)).first()
    assert f"--keep {name}" in refused.value.todo


def test_the_error_of_experts_is_that_of_their_outputs_alone(tmp_path: Path) -> None:
    """Against products in float64 of what each slot reads in the unquantised model."""
    model = imported()
    made = decision(tmp_path, Quantization("int4", algorithm="rtn", activations="none"), model)
    found = made.measured(made.first(), Windows(TEXT.ids[:1], "one")).measured
    assert found is not None
    seen = {}

    def note(op, call):  # noqa: ANN001, ANN202
        if op.kind == "moe_linear" and call.args[0].ndim == 3:
            seen.setdefault("x", call.args[0].astype(np.float64))
            seen.setdefault("experts", call.args[2])
        return in_place(op, call)

    logits_of(made.graph, model.weights.read, TEXT.ids[0], note)
    w = model.weights.read(DOWN.format(0))
    stack = made.first().run(made.graph)
    codes = next(op for op in stack.ops if op.kind == "quantize_weight" and op.args[0].name == _name(made, 0))  # type: ignore[union-attr]
    assert codes.attr("dtype") == "u4"
    q, scale = round_weight(w.reshape(-1, INNER), DType.U4, 0, True, DType.F16)
    back = dequantize(q, scale, 8, None, 0).reshape(w.shape).astype(np.float64)
    y, z = (np.einsum("tki,tkoi->tko", seen["x"], m[seen["experts"]]) for m in (w.astype(np.float64), back))
    error = next(e for e in found.layers if e.loc == DOWN.format(0))
    assert error.error == pytest.approx(np.linalg.norm(y - z) / np.linalg.norm(y), rel=1e-4)
    assert error.weights == w.size and {e.loc for e in found.layers} >= {UP.format(0), UP.format(1)}


def _name(made, n: int) -> str:  # noqa: ANN001
    return next(name for name, (_, uses) in made.matrices.items() if uses[0].paths[-1] == DOWN.format(n))


def test_auto_raises_stacks_by_name(tmp_path: Path) -> None:
    made = decision(tmp_path, Quantization("auto", algorithm="rtn", activations="none"), imported())
    decided = made.first()
    raised = made.raised(decided, {**decided.formats, _name(made, 1): "int8"})
    assert raised.raised == (f"{DOWN.format(1)}=int8",)
    ops = [op for op in raised.run(made.graph).ops if op.kind == "quantize_weight"]
    dtypes = {op.args[0].name: op.attr("dtype") for op in ops}  # type: ignore[union-attr]
    assert dtypes[_name(made, 1)] == "i8" and dtypes[_name(made, 0)] == "u4"
