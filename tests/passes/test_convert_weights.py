"""convert_weights: element types of matrices, tables, and everything else."""

from __future__ import annotations

import numpy as np
import pytest

from ir.interpret import interpret
from ir.types import DType
from passes.convert_weights import ConvertWeights
from tests.passes.checks import apply, expect, random_inputs, random_weights, read

F32 = """graph @g(%ids: i32[T]) dims {T: 1..64} {
%x = embed %ids, @e: f32[9,8] : f32[T,8]
%n = rms_norm %x, @n: f32[8] {eps=1e-05} : f32[T,8]
%w = concat @q: f32[4,8], @k: f32[4,8] {axis=0} : f32[8,8]
%a = linear %n, %w, @b: f32[8], %x : f32[T,8]
%z = linear %a, @e: f32[9,8] : f32[T,9]
return %z
}"""

BF16 = """graph @g(%ids: i32[T]) dims {T: 1..64} {
%e.bf16 = cast @e: f32[9,8] {dtype="bf16"} : bf16[9,8]
%x = embed %ids, %e.bf16 {dtype="f32"} : f32[T,8]
%n = rms_norm %x, @n: f32[8] {eps=1e-05} : f32[T,8]
%w = concat @q: f32[4,8], @k: f32[4,8] {axis=0} : f32[8,8]
%w.bf16 = cast %w {dtype="bf16"} : bf16[8,8]
%a = linear %n, %w.bf16, @b: f32[8], %x : f32[T,8]
%z = linear %a, %e.bf16 : f32[T,9]
return %z
}"""


def test_matrices_and_tables_become_bf16_and_the_rest_stays() -> None:
    found = expect(ConvertWeights("bf16"), F32, BF16, rtol=0.1)
    assert found.count == 2
    before, inputs, weights = read(F32), random_inputs(read(F32)), dict(random_weights(read(F32)))
    for name in ("e", "q", "k"):  # numbers that bf16 holds lose nothing
        weights[name] = weights[name].astype(DType.BF16.numpy).astype(np.float32)
    expected = interpret(before, inputs, weights).outputs[0]
    np.testing.assert_array_equal(interpret(found.graph, inputs, weights).outputs[0], expected)


def test_f32_leaves_f32_alone_and_runs_again_without_change() -> None:
    assert apply(ConvertWeights("f32"), F32).count == 0
    assert apply(ConvertWeights("bf16"), BF16).count == 0


STORED = """graph @g(%ids: i32[T], %y: f32[T,8]) dims {T: 1..64} {
%e = embed %ids, @e: bf16[9,8] {dtype="f32"} : f32[T,8]
%x = add %e, %y : f32[T,8]
%u = add @n: bf16[8], 1.0 : bf16[8]
%uf = cast %u {dtype="f32"} : f32[8]
%n = rms_norm %x, %uf {eps=1e-05} : f32[T,8]
%a = linear %n, @w: f16[4,8], @b: bf16[4] : f32[T,4]
return %a
}"""


def test_stored_16_bit_weights_are_computed_with_in_f32() -> None:
    expect(
        ConvertWeights("f32"),
        STORED,
        """graph @g(%ids: i32[T], %y: f32[T,8]) dims {T: 1..64} {
        %e.f32 = cast @e: bf16[9,8] {dtype="f32"} : f32[9,8]
        %e = embed %ids, %e.f32 {dtype="f32"} : f32[T,8]
        %x = add %e, %y : f32[T,8]
        %n.f32 = cast @n: bf16[8] {dtype="f32"} : f32[8]
        %u = add %n.f32, 1.0 : f32[8]
        %n = rms_norm %x, %u {eps=1e-05} : f32[T,8]
        %w.f32 = cast @w: f16[4,8] {dtype="f32"} : f32[4,8]
        %b.f32 = cast @b: bf16[4] {dtype="f32"} : f32[4]
        %a = linear %n, %w.f32, %b.f32 : f32[T,4]
        return %a
        }""",
        rtol=0.02,  # 1 + n was rounded to bf16 before, and is not now
    )
    found = apply(ConvertWeights("bf16"), STORED, rtol=0.02)
    (embed,) = [op for op in found.graph.ops if op.kind == "embed"]
    assert embed.args[1].type.dtype is DType.BF16  # type: ignore[union-attr]
    assert embed.attrs == {"dtype": "f32"}


def test_16_bit_activations_keep_their_type() -> None:
    text = """graph @g(%x: bf16[T,8]) dims {T: 1..64} {
    %u = add @n: bf16[8], 1.0 : bf16[8]
    %y = mul %x, %u : bf16[T,8]
    %z = mul %y, @m: bf16[8] : bf16[T,8]
    return %z
    }"""
    found = apply(ConvertWeights("f32"), text, rtol=0.02)
    assert found.graph.outputs[0].type == read(text).outputs[0].type
    assert [op.kind for op in found.graph.ops] == ["cast", "add", "cast", "mul", "mul"]


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match="f32 or bf16"):
        ConvertWeights("int8")
