"""fuse_epilogue: bias, activation, gate and residual into a linear, and what keeps each outside."""

from __future__ import annotations

from functools import partial

import pytest

from passes.fuse_epilogue import FuseEpilogue
from tests.passes.checks import apply, expect, graph_text, refuse

HEAD = "graph @g(%x: f32[T,8], %r: f32[T,8], %u: f32[T,6]) dims {T: 1..64} {"
body = partial(graph_text, HEAD)


def test_bias_activation_and_residual_become_one_linear() -> None:
    expect(
        FuseEpilogue(),
        body(
            "%a = linear %x, @w: f32[8,8] : f32[T,8]",
            "%b = add @b: f32[8], %a : f32[T,8]",
            "%c = gelu %b : f32[T,8]",
            "%z = add %r, %c : f32[T,8] // mlp",
        ),
        body('%z = linear %x, @w: f32[8,8], @b: f32[8], %r {activation="gelu"} : f32[T,8] // mlp'),
    )


def test_a_residual_without_bias_leaves_that_operand_out() -> None:
    expect(
        FuseEpilogue(),
        body("%a = linear %x, @w: f32[8,8] : f32[T,8]", "%z = add %a, %r : f32[T,8]"),
        body("%z = linear %x, @w: f32[8,8], _, %r : f32[T,8]"),
    )


def test_an_activation_after_the_residual_stays_outside() -> None:
    found = apply(
        FuseEpilogue(),
        body(
            "%a = linear %x, @w: f32[8,8] : f32[T,8]", "%b = add %a, %r : f32[T,8]", "%z = relu %b : f32[T,8]"
        ),
    )
    assert [op.kind for op in found.graph.ops] == ["linear", "relu"]
    assert any("residual already" in str(m) for m in found.misses)


def test_the_result_keeps_the_type_that_the_linear_was_given() -> None:
    expect(
        FuseEpilogue(),
        body(
            '%n = cast %x {dtype="bf16"} : bf16[T,8]',
            '%a = linear %n, @w: bf16[8,8] {dtype="f32"} : f32[T,8]',
            "%b = add %a, @b: f32[8] : f32[T,8]",
            "%z = add %r, %b : f32[T,8]",
        ),
        body(
            '%n = cast %x {dtype="bf16"} : bf16[T,8]',
            '%z = linear %n, @w: bf16[8,8], @b: f32[8], %r {dtype="f32"} : f32[T,8]',
        ),
    )
    gated = [
        '%n = cast %x {dtype="bf16"} : bf16[T,8]',
        '%a = linear %n, @w: bf16[12,8] {dtype="f32"} : f32[T,12]',
    ]
    found = apply(
        FuseEpilogue(), body(*gated, SPLIT, "%s = silu %g : f32[T,6]", "%z = mul %s, %p : f32[T,6]")
    )
    assert found.graph.ops[-1].attrs == {"activation": "silu", "gated": True, "dtype": "f32"}


MERGED = "%a = linear %x, @w: f32[12,8], @b: f32[12] : f32[T,12]"
SPLIT = "%g, %p = split %a {axis=1, sizes=[6,6]} : f32[T,6], f32[T,6]"
SLICES = [
    "%g = slice %a {axis=1, start=0, stop=6} : f32[T,6]",
    "%p = slice %a {axis=1, start=6, stop=12} : f32[T,6]",
]
GATED = '%z = linear %x, @w: f32[12,8], @b: f32[12] {activation="silu", gated=true} : f32[T,6]'


@pytest.mark.parametrize("halves", [[SPLIT], SLICES])
@pytest.mark.parametrize("product", ["%s, %p", "%p, %s"])
def test_gate_times_up(halves: list[str], product: str) -> None:
    expect(
        FuseEpilogue(),
        body(MERGED, *halves, "%s = silu %g : f32[T,6]", f"%z = mul {product} : f32[T,6]"),
        body(GATED),
    )


def test_a_gate_in_the_second_half_exchanges_the_weights() -> None:
    found = apply(
        FuseEpilogue(),
        body(
            MERGED,
            SPLIT,
            "%s = silu %p : f32[T,6]",
            "%o = mul %g, %s : f32[T,6]",
            "%z = add %o, %u : f32[T,6]",
        ),
    )
    assert [op.kind for op in found.graph.ops] == ["slice", "slice", "concat"] * 2 + ["linear"]
    assert found.graph.ops[-1].attrs == {"activation": "silu", "gated": True}


def test_a_plain_product_of_halves_is_gated_without_activation() -> None:
    expect(
        FuseEpilogue(),
        body(MERGED, SPLIT, "%z = mul %g, %p : f32[T,6]"),
        body('%z = linear %x, @w: f32[12,8], @b: f32[12] {activation="none", gated=true} : f32[T,6]'),
    )


A = "%a = linear %x, @w: f32[8,8] : f32[T,8]"
MISSES = [
    ([A, "%b = relu %a : f32[T,8]", "%z = mul %a, %b : f32[T,8]"], "used elsewhere"),
    (
        [A, "%e = exp %a : f32[T,8]", "%f = add %a, %r : f32[T,8]", "%z = mul %e, %f : f32[T,8]"],
        "used elsewhere",
    ),
    (
        [
            *(MERGED, SPLIT, "%s = silu %g : f32[T,6]"),
            *("%m = mul %s, %p : f32[T,6]", "%z = sub %m, %p : f32[T,6]"),
        ],
        "a half is used elsewhere",
    ),
    (
        [
            *(MERGED, "%g, %p, %o = split %a {axis=1, sizes=[4,4,4]} : f32[T,4], f32[T,4], f32[T,4]"),
            *("%s = silu %g : f32[T,4]", "%m = mul %s, %o : f32[T,4]", "%z = sub %m, %p : f32[T,4]"),
        ],
        "not halves",
    ),
    (["%a = linear %x, @w: f32[1,8] : f32[T,1]", "%z = add %a, %r : f32[T,8]"], "what is added"),
    ([A, "%z = add %a, @c: f32[1] : f32[T,8]"], "one number per output"),
]


@pytest.mark.parametrize(("lines", "reason"), MISSES)
def test_misses(lines: list[str], reason: str) -> None:
    refuse(FuseEpilogue(), body(*lines), reason)
