"""fuse_norm: the ways to write RMSNorm and LayerNorm, and things that only look like them."""

from __future__ import annotations

from functools import partial

import pytest

from passes.fuse_norm import FuseNorm
from tests.passes.checks import apply, expect, graph_text, refuse

HEAD = "graph @g(%x: f32[1,S,8], %y: f32[1,S,8]) dims {S: 1..64} {"
body = partial(graph_text, HEAD)

MEANS = {
    "mean": ["%m = mean %q {axes=[2], keepdims=true} : f32[1,S,1]"],
    "sum / n": ["%t = sum %q {axes=[2], keepdims=true} : f32[1,S,1]", "%m = div %t, 8.0 : f32[1,S,1]"],
    "sum * 1/n": ["%t = sum %q {axes=[2], keepdims=true} : f32[1,S,1]", "%m = mul %t, 0.125 : f32[1,S,1]"],
    "axis put back": [
        "%t = mean %q {axes=[2]} : f32[1,S]",
        "%m = reshape %t {shape=[1,S,1]} : f32[1,S,1]",
    ],
}
SQUARE = "%q = mul %x, %x : f32[1,S,8]"
EPS = "%e = add %m, 1e-06 : f32[1,S,1]"
SCALED = {
    "rsqrt": ["%r = rsqrt %e : f32[1,S,1]", "%n = mul %r, %x : f32[1,S,8]"],
    "sqrt": ["%r = sqrt %e : f32[1,S,1]", "%n = div %x, %r : f32[1,S,8]"],
}


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("scaled", SCALED)
def test_rms_norm_with_weight(mean: str, scaled: str) -> None:
    expect(
        FuseNorm(),
        body(SQUARE, *MEANS[mean], EPS, *SCALED[scaled], "%z = mul @w: f32[8], %n : f32[1,S,8]"),
        body("%z = rms_norm %x, @w: f32[8] {eps=1e-06} : f32[1,S,8]"),
    )


def test_one_plus_weight_stays_a_weight_op_and_no_weight_is_a_norm_too() -> None:
    norm = [SQUARE, *MEANS["mean"], EPS, *SCALED["rsqrt"]]
    expect(
        FuseNorm(),
        body(*norm, "%w = add @w: f32[8], 1.0 : f32[8]", "%z = mul %n, %w : f32[1,S,8]"),
        body("%w = add @w: f32[8], 1.0 : f32[8]", "%z = rms_norm %x, %w {eps=1e-06} : f32[1,S,8]"),
    )
    expect(FuseNorm(), body(*norm, out="n"), body("%n = rms_norm %x {eps=1e-06} : f32[1,S,8]", out="n"))


CENTRED = [
    "%u = mean %x {axes=[2], keepdims=true} : f32[1,S,1]",
    "%c = sub %x, %u : f32[1,S,8]",
    "%q = mul %c, %c : f32[1,S,8]",
    *MEANS["mean"],
    EPS,
    "%r = rsqrt %e : f32[1,S,1]",
    "%n = mul %c, %r : f32[1,S,8]",
]


def test_layer_norm_with_weight_and_bias() -> None:
    expect(
        FuseNorm(),
        body(*CENTRED, "%k = mul %n, @w: f32[8] : f32[1,S,8]", "%z = add %k, @b: f32[8] : f32[1,S,8]"),
        body("%z = layer_norm %x, @w: f32[8], @b: f32[8] {eps=1e-06} : f32[1,S,8]"),
    )
    expect(
        FuseNorm(),
        body(*CENTRED, "%z = add @b: f32[8], %n : f32[1,S,8]"),
        body("%z = layer_norm %x, _, @b: f32[8] {eps=1e-06} : f32[1,S,8]"),
    )


def test_values_centred_by_another_mean_are_an_rms_norm() -> None:
    lines = ["%u = mean %y {axes=[2], keepdims=true} : f32[1,S,1]", *CENTRED[1:]]
    kinds = [op.kind for op in apply(FuseNorm(), body(*lines, out="n")).graph.ops]
    assert kinds == ["mean", "sub", "rms_norm"]


def test_one_weight_per_head_and_a_norm_over_two_axes() -> None:
    head = "graph @g(%x: f32[S,2,4]) dims {S: 1..64} {"
    expect(
        FuseNorm(),
        head
        + """
        %q = mul %x, %x : f32[S,2,4]
        %m = mean %q {axes=[2], keepdims=true} : f32[S,2,1]
        %e = add %m, 1e-06 : f32[S,2,1]
        %r = rsqrt %e : f32[S,2,1]
        %n = mul %x, %r : f32[S,2,4]
        %z = mul %n, @w: f32[1,2,4] : f32[S,2,4]
        return %z
        }""",
        head
        + """
        %v2 = reshape @w: f32[1,2,4] {shape=[2,4]} : f32[2,4]
        %z = rms_norm %x, %v2 {eps=1e-06} : f32[S,2,4]
        return %z
        }""",
    )
    expect(
        FuseNorm(),
        head
        + """
        %q = mul %x, %x : f32[S,2,4]
        %m = mean %q {axes=[1,2], keepdims=true} : f32[S,1,1]
        %e = add %m, 1e-06 : f32[S,1,1]
        %r = rsqrt %e : f32[S,1,1]
        %z = mul %x, %r : f32[S,2,4]
        return %z
        }""",
        head + "%z = rms_norm %x {eps=1e-06, rank=2} : f32[S,2,4] return %z }",
    )


def test_a_mean_over_tokens_is_no_norm() -> None:
    lines = [
        SQUARE,
        "%m = mean %q {axes=[1], keepdims=true} : f32[1,1,8]",
        "%e = add %m, 1e-06 : f32[1,1,8]",
        "%r = rsqrt %e : f32[1,1,8]",
        "%n = mul %x, %r : f32[1,S,8]",
    ]
    refuse(FuseNorm(), body(*lines, out="n"), "over axes [1], not the last ones")


def test_another_value_measured_and_an_eps_that_is_none_are_misses() -> None:
    measured = [SQUARE, *MEANS["mean"], EPS, "%r = rsqrt %e : f32[1,S,1]", "%z = mul %y, %r : f32[1,S,8]"]
    refuse(FuseNorm(), body(*measured), "of another value")
    eps = [SQUARE, *MEANS["mean"], "%e = add %m, @eps: f32[1] : f32[1,S,1]"]
    text = body(*eps, "%a = abs %e : f32[1,S,1]", *[s.replace("%e", "%a") for s in SCALED["sqrt"]], out="n")
    assert apply(FuseNorm(), text.replace("@eps", "@w")).count == 0
    scaled = ["%r = sqrt %e : f32[1,S,1]", "%n = div %x, %r : f32[1,S,8]"]
    plain = body(*[s.replace("@eps: f32[1]", "%y1") for s in eps], *scaled, out="n").replace(
        SQUARE, SQUARE + "\n%y1 = max %q {axes=[2], keepdims=true} : f32[1,S,1]"
    )
    refuse(FuseNorm(), plain, "not a literal")


def test_a_sum_divided_by_another_number_is_not_a_mean() -> None:
    lines = ["%t = sum %q {axes=[2], keepdims=true} : f32[1,S,1]", "%m = div %t, 7.0 : f32[1,S,1]"]
    assert apply(FuseNorm(), body(SQUARE, *lines, EPS, *SCALED["rsqrt"], out="n")).count == 0


def test_a_norm_used_twice_keeps_its_weight_outside() -> None:
    norm = [SQUARE, *MEANS["mean"], EPS, *SCALED["rsqrt"]]
    found = apply(
        FuseNorm(), body(*norm, "%k = mul %n, @w: f32[8] : f32[1,S,8]", "%z = add %k, %n : f32[1,S,8]")
    )
    assert [op.kind for op in found.graph.ops] == ["rms_norm", "mul", "add"]
    assert any("used elsewhere" in str(m) for m in found.misses)
