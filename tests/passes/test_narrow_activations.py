"""narrow_activations: which linears read bf16, and that nothing but their input is rounded."""

from __future__ import annotations

from functools import partial

import ml_dtypes
import numpy as np
import pytest

from ir.interpret import interpret
from passes.cse import Cse
from passes.narrow_activations import NarrowActivations
from tests.passes.checks import apply, expect, graph_text, random_inputs, random_weights

body = partial(graph_text, "graph @g(%x: f32[T,8], %r: f32[T,6]) dims {T: 1..64} {")
BEFORE = body("%z = linear %x, @w: bf16[6,8], @b: f32[6], %r : f32[T,6] // out")
AFTER = body(
    '%x.bf16 = cast %x {dtype="bf16"} : bf16[T,8] // out',
    '%z = linear %x.bf16, @w: bf16[6,8], @b: f32[6], %r {dtype="f32"} : f32[T,6] // out',
)


def test_a_linear_with_bf16_weights_reads_bf16_and_keeps_its_result() -> None:
    assert expect(NarrowActivations("bf16"), BEFORE, AFTER, rtol=0.2).count == 1
    assert apply(NarrowActivations("bf16"), AFTER).count == 0


def test_the_factors_are_rounded_and_the_sums_are_not() -> None:
    graph = apply(NarrowActivations("bf16"), BEFORE, rtol=0.2).graph
    inputs, weights = random_inputs(graph), random_weights(graph)
    x = inputs["x"].astype(ml_dtypes.bfloat16).astype(np.float64)
    expected = x @ weights["w"].astype(np.float64).T + weights["b"] + inputs["r"]
    assert np.abs(inputs["x"] - x).max() > 0
    np.testing.assert_allclose(
        interpret(graph, inputs, weights, np.float64).outputs[0], expected, rtol=1e-12, atol=1e-12
    )


def test_linears_of_one_value_share_its_cast() -> None:
    text = body(
        "%a = linear %x, @v: bf16[6,8] : f32[T,6]",
        "%c = linear %x, @w: bf16[6,8] : f32[T,6]",
        "%z = sub %a, %c : f32[T,6]",
    )
    found = apply(Cse(), apply(NarrowActivations("bf16"), text, rtol=0.2).graph).graph
    assert [op.kind for op in found.ops] == ["cast", "linear", "linear", "sub"]


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (NarrowActivations("f32"), "%z = linear %x, @w: bf16[6,8] : f32[T,6]"),
        (NarrowActivations("bf16"), "%z = linear %x, @w: f32[6,8] : f32[T,6]"),
    ],
)
def test_what_stays(step: NarrowActivations, line: str) -> None:
    assert apply(step, body(line)).count == 0


def test_a_linear_of_weights_stays() -> None:
    text = body("%c = linear @p: f32[1,8], @w: bf16[6,8] : f32[1,6]", "%z = add %r, %c : f32[T,6]")
    assert apply(NarrowActivations("bf16"), text).count == 0


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="f32 or bf16"):
        NarrowActivations("f16")
