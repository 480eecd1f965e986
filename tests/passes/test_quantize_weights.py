"""quantize_weights: which matrices become codes, of which format, and which stay as they are."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ir.graph import Weight
from ir.interpret import interpret
from ir.text.printer import print_graph
from ir.types import DType, Tensor
from passes.dce import Dce
from passes.quantize_weights import Codes, QuantizeWeights
from tests.passes.checks import graph_text, random_inputs, random_weights, read

HEAD = "graph @g(%ids: i32[T], %x: f32[T,64]) dims {T: 1..64} {"
body = partial(graph_text, HEAD)
LINES = [
    "%e = embed %ids, @emb: f32[50,64] : f32[T,64] // model.embed",
    "%w = concat @l0.q.weight: f32[32,64], @l0.k.weight: f32[32,64] {axis=0} : f32[64,64] // l0",
    "%y = linear %e, %w : f32[T,64] // l0",
    "%z = linear %y, @emb: f32[50,64] : f32[T,50] // lm_head",
]
LINEAR = "%z = linear %x, %w : f32[T,64] // l0"


def run(step: QuantizeWeights, *lines: str) -> list[str]:
    """The graph after the pass, its ops as text without locs."""
    after = Dce().run(step.run(read(body(*(lines or LINES)))).graph).graph
    return [line.split(" //")[0].strip() for line in print_graph(read(print_graph(after))).splitlines()[1:-2]]


def codes_of(step: QuantizeWeights, *lines: str) -> list[str]:
    """dtype and group size of each matrix that is quantised, in order."""
    ops = step.run(read(body(*(lines or LINES)))).graph.ops
    return [f"{op.attr('dtype')}:{op.attr('group_size')}" for op in ops if op.kind == "quantize_weight"]


def test_a_matrix_becomes_codes_that_are_dequantised() -> None:
    found = run(QuantizeWeights("u4"), LINES[1], LINEAR)
    assert found[1:] == [
        '%v1, %v2 = quantize_weight %w {dtype="u4", group_size=32, symmetric=true, scale="f16"} '
        ": u4[64,64], f16[64,2]",
        "%v3 = dequantize %v1, %v2 {group_size=32, zero=8} : f32[64,64]",
        "%z = linear %x, %v3 : f32[T,64]",
    ]


def test_without_symmetry_there_is_an_offset() -> None:
    found = run(
        QuantizeWeights("u4", symmetric=False), LINES[1], LINES[2].replace("%e", "%x").replace("%y", "%z")
    )
    assert found[2] == "%v4 = dequantize %v1, %v2, _, %v3 {group_size=32, zero=0} : f32[64,64]"


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (QuantizeWeights(), []),
        (QuantizeWeights("i8", 64), ["i8:0", "i8:0", "i8:0"]),  # 64 is all of a row
        (QuantizeWeights("f8e4m3"), ["f8e4m3:0", "f8e4m3:0", "f8e4m3:0"]),
        (QuantizeWeights("u4", tables="i8"), ["i8:32", "u4:32", "i8:32"]),
        (QuantizeWeights("u4", keep=("l0*",)), ["u4:32", "u4:32"]),
        (QuantizeWeights("u4", keep=("l0.k",)), ["u4:32", "u4:32"]),
        (QuantizeWeights("u4", keep=("lm_head",)), ["u4:32"]),  # what it shares is kept too
        (QuantizeWeights("u4", overrides=("lm_*=i8", "l0=none")), ["i8:32", "i8:32"]),
    ],
)
def test_formats_follow_the_modules(step: QuantizeWeights, expected: list[str]) -> None:
    assert codes_of(step) == expected


def test_a_kept_matrix_is_noted() -> None:
    (miss,) = QuantizeWeights("u4", keep=("l0",)).run(read(body(*LINES))).misses
    assert "stay as it is" in str(miss) and "l0" in str(miss)


def test_codes_of_the_checkpoint_stay() -> None:
    lines = [
        "%w = dequantize @q: u4[8,64], @s: f16[8,2] {group_size=32, zero=8} : f32[8,64]",
        "%z = linear %x, %w : f32[T,8] // l0",
    ]
    assert codes_of(QuantizeWeights("i8"), *lines) == []


def test_calibrated_codes_are_read_and_the_input_scaled() -> None:
    f16, u4 = DType.F16, DType.U4
    codes = Codes(
        Weight("w.q", Tensor(u4, (50, 64))), Weight("w.scale", Tensor(f16, (50, 2))),
        8, None, 32, Weight("w.input", Tensor(DType.F32, (64,))),
    )  # fmt: skip
    step = QuantizeWeights("u4", calibrated={"head": codes})
    found = run(step, "%z = linear %x, @head: f32[50,64] : f32[T,50] // lm_head")
    assert found == [
        "%v1 = dequantize @w.q: u4[50,64], @w.scale: f16[50,2] {group_size=32, zero=8} : f32[50,64]",
        "%v2 = mul %x, @w.input: f32[64] : f32[T,64]",
        "%z = linear %v2, %v1 : f32[T,50]",
    ]


@pytest.mark.parametrize(("dtype", "bound"), [("u4", 0.2), ("i8", 0.01), ("f8e4m3", 0.06)])
def test_results_are_near(dtype: str, bound: float) -> None:
    graph = read(body(*LINES))
    inputs, weights = random_inputs(graph), random_weights(graph)
    want, got = (
        interpret(g, inputs, weights, np.float64).outputs[0]
        for g in (graph, QuantizeWeights(dtype).run(graph).graph)
    )
    error = np.std(got - want) / np.std(want)
    assert bound / 10 < error < bound


@pytest.mark.parametrize(
    "options", [{"dtype": "i4"}, {"tables": "f16"}, {"overrides": ("a=u3",)}, {"group_size": -1}]
)
def test_refuses_what_there_is_not(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="quantize_weights"):
        QuantizeWeights(**options)  # type: ignore[arg-type]
