"""fuse_rope: half and interleaved rotation, of a whole head or a part, and rotations that are not rope."""

from __future__ import annotations

from functools import partial

import pytest

from passes.canonicalize import Canonicalize
from passes.cse import Cse
from passes.dce import Dce
from passes.fuse_rope import FuseRope
from tests.passes.checks import apply, assert_same_numbers, expect, graph_text, read, refuse

HEAD = "graph @g(%x: f32[1,3,S,8], %f: f32[1,S,4], %n: f32[1,S,2]) dims {S: 1..64} {"
body = partial(graph_text, HEAD)

ANGLES = [
    "%ff = concat %f, %f {axis=2} : f32[1,S,8]",
    "%c = cos %ff : f32[1,S,8]",
    "%s = sin %ff : f32[1,S,8]",
    "%ca = mul %c, 1.5 : f32[1,S,8]",
    "%sa = mul %s, 1.5 : f32[1,S,8]",
    "%cos = reshape %ca {shape=[1,1,S,8]} : f32[1,1,S,8]",
    "%sin = reshape %sa {shape=[1,1,S,8]} : f32[1,1,S,8]",
]
ROTATED = [
    "%x1 = slice %x {axis=3, start=0, stop=4} : f32[1,3,S,4]",
    "%x2 = slice %x {axis=3, start=4, stop=8} : f32[1,3,S,4]",
    "%m = neg %x2 : f32[1,3,S,4]",
    "%r = concat %m, %x1 {axis=3} : f32[1,3,S,8]",
]
SUM = [
    "%p = mul %x, %cos : f32[1,3,S,8]",
    "%q = mul %r, %sin : f32[1,3,S,8]",
    "%z = add %p, %q : f32[1,3,S,8] // attn",
]
HALF_ANGLES = [
    "%v2 = cos %f : f32[1,S,4]",
    "%v3 = mul %v2, 1.5 : f32[1,S,4]",
    "%v4 = reshape %v3 {shape=[1,1,S,4]} : f32[1,1,S,4]",
    "%v5 = sin %f : f32[1,S,4]",
    "%v6 = mul %v5, 1.5 : f32[1,S,4]",
    "%v7 = reshape %v6 {shape=[1,1,S,4]} : f32[1,1,S,4]",
]


def kinds(text: str) -> list[str]:
    """The ops that the pass leaves, between those that run around it, if the result computes the same."""
    graph = read(text)
    after = graph
    for step in (Canonicalize(), Cse(), FuseRope(), Cse(), Dce()):
        after = step.run(after).graph
    assert_same_numbers(graph, after)
    return [op.kind for op in after.ops]


def test_half_rotation_takes_the_angles_of_one_half() -> None:
    found = apply(FuseRope(), body(*ANGLES, *ROTATED, *SUM))
    assert [op.kind for op in found.graph.ops] == ["cos", "mul", "reshape", "sin", "mul", "reshape", "rope"]
    rope = found.graph.ops[-1]
    assert (rope.out.name, rope.loc, dict(rope.attrs)) == ("z", "attn", {})
    assert found.count == 1


def test_query_and_key_share_one_cos_and_sin() -> None:
    lines = [*ANGLES, *ROTATED, *SUM[:2], "%a = add %q, %p : f32[1,3,S,8]"]
    key = [line.replace("%x,", "%y,").replace("%x ", "%y ") for line in [*ROTATED, *SUM[:2]]]
    for name in ("x1", "x2", "m", "r", "p", "q"):
        key = [line.replace(f"%{name} ", f"%k{name} ").replace(f"%{name},", f"%k{name},") for line in key]
    key = [line.replace("concat %m, %x1", "concat %km, %kx1") for line in key]
    text = body(
        "%y = neg %x : f32[1,3,S,8]", *lines, *key, "%b = add %kp, %kq : f32[1,3,S,8]",
        "%z = mul %a, %b : f32[1,3,S,8]",
    )  # fmt: skip
    found = kinds(text)
    assert (found.count("rope"), found.count("cos"), found.count("sin")) == (2, 1, 1)


REPEATED = {
    "repeat_interleave": [
        "%f1 = reshape %f {shape=[1,S,4,1]} : f32[1,S,4,1]",
        "%f2 = expand %f1 {shape=[1,S,4,2]} : f32[1,S,4,2]",
        "%ff = reshape %f2 {shape=[1,S,8]} : f32[1,S,8]",
    ],
    "stack": [
        "%f1 = reshape %f {shape=[1,S,4,1]} : f32[1,S,4,1]",
        "%f2 = concat %f1, %f1 {axis=3} : f32[1,S,4,2]",
        "%ff = reshape %f2 {shape=[1,S,8]} : f32[1,S,8]",
    ],
}
TURNED = [
    "%x1 = slice %x {axis=3, start=0, stop=8, step=2} : f32[1,3,S,4]",
    "%x2 = slice %x {axis=3, start=1, stop=8, step=2} : f32[1,3,S,4]",
    "%m = neg %x2 : f32[1,3,S,4]",
    "%m1 = reshape %m {shape=[1,3,S,4,1]} : f32[1,3,S,4,1]",
    "%m2 = reshape %x1 {shape=[1,3,S,4,1]} : f32[1,3,S,4,1]",
    "%m3 = concat %m1, %m2 {axis=4} : f32[1,3,S,4,2]",
    "%r = reshape %m3 {shape=[1,3,S,8]} : f32[1,3,S,8]",
]


@pytest.mark.parametrize("repeated", REPEATED)
def test_interleaved_rotation(repeated: str) -> None:
    text = body(*REPEATED[repeated], *ANGLES[1:], *TURNED, *SUM)
    found = apply(FuseRope(), text)
    assert found.graph.ops[-1].attrs == {"interleaved": True}
    assert kinds(text) == ["cos", "mul", "reshape", "sin", "mul", "reshape", "rope"]


def test_styles_do_not_mix() -> None:
    refuse(FuseRope(), body(*ANGLES, *TURNED, *SUM), "cos and sin are not seen to repeat one half")
    wide = [line for line in (*REPEATED["stack"], *ANGLES[1:])]
    refuse(FuseRope(), body(*wide, *ROTATED, *SUM), "cos and sin are not seen to repeat one half")


JOINED = [
    "%cos = cos %f : f32[1,S,4]",
    "%sin = sin %f : f32[1,S,4]",
    "%x1 = slice %x {axis=3, start=0, stop=4} : f32[1,3,S,4]",
    "%x2 = slice %x {axis=3, start=4, stop=8} : f32[1,3,S,4]",
    "%a = mul %x1, %cos : f32[1,3,S,4]",
    "%b = mul %x2, %sin : f32[1,3,S,4]",
    "%c = mul %x2, %cos : f32[1,3,S,4]",
    "%d = mul %sin, %x1 : f32[1,3,S,4]",
    "%e = sub %a, %b : f32[1,3,S,4]",
    "%g = add %c, %d : f32[1,3,S,4]",
]
JOIN = "%z = concat %e, %g {axis=3} : f32[1,3,S,8]"


def test_two_halves_rotated_apart_and_joined() -> None:
    expect(FuseRope(), body(*JOINED, JOIN), body(*JOINED[:2], "%z = rope %x, %cos, %sin : f32[1,3,S,8]"))
    split = [
        *JOINED[:2],
        "%x1, %x2 = split %x {axis=3, sizes=[4,4]} : f32[1,3,S,4], f32[1,3,S,4]",
        *JOINED[4:],
    ]
    expect(FuseRope(), body(*split, JOIN), body(*JOINED[:2], "%z = rope %x, %cos, %sin : f32[1,3,S,8]"))


def test_pairs_of_the_last_axis_rotated_and_stacked() -> None:
    pairs = [
        "%xp = reshape %x {shape=[1,3,S,4,2]} : f32[1,3,S,4,2]",
        "%xa = slice %xp {axis=4, start=0, stop=1} : f32[1,3,S,4,1]",
        "%xb = slice %xp {axis=4, start=1, stop=2} : f32[1,3,S,4,1]",
        "%x1 = reshape %xa {shape=[1,3,S,4]} : f32[1,3,S,4]",
        "%x2 = reshape %xb {shape=[1,3,S,4]} : f32[1,3,S,4]",
    ]
    stack = [
        "%e1 = reshape %e {shape=[1,3,S,4,1]} : f32[1,3,S,4,1]",
        "%g1 = reshape %g {shape=[1,3,S,4,1]} : f32[1,3,S,4,1]",
        "%st = concat %e1, %g1 {axis=4} : f32[1,3,S,4,2]",
        "%z = reshape %st {shape=[1,3,S,8]} : f32[1,3,S,8]",
    ]
    expect(
        FuseRope(),
        body(*JOINED[:2], *pairs, *JOINED[4:], *stack),
        body(*JOINED[:2], "%z = rope %x, %cos, %sin {interleaved=true} : f32[1,3,S,8]"),
    )


def test_a_rotation_the_other_way_is_refused() -> None:
    backwards = [
        *JOINED[:8],
        "%e = add %a, %b : f32[1,3,S,4]",
        "%g = sub %c, %d : f32[1,3,S,4]",
        "%z = concat %g, %e {axis=3} : f32[1,3,S,8]",
    ]
    refuse(FuseRope(), body(*backwards), "not two halves (or alternate elements) of x")
    mixed = [*JOINED[:8], "%e = sub %a, %d : f32[1,3,S,4]", "%g = add %c, %b : f32[1,3,S,4]", JOIN]
    refuse(FuseRope(), body(*mixed), "not one rotation of one pair")
    turned = [
        *ROTATED[:2],
        "%m = neg %x1 : f32[1,3,S,4]",
        "%r = concat %x2, %m {axis=3} : f32[1,3,S,8]",
    ]
    refuse(FuseRope(), body(*ANGLES, *turned, *SUM), "not (-x2, x1)")


def test_what_is_not_halves_of_the_same_head_is_refused() -> None:
    uneven = [
        "%x1 = slice %x {axis=3, start=0, stop=3} : f32[1,3,S,3]",
        "%x2 = slice %x {axis=3, start=3, stop=8} : f32[1,3,S,5]",
        "%m = neg %x2 : f32[1,3,S,5]",
        "%r = concat %m, %x1 {axis=3} : f32[1,3,S,8]",
    ]
    assert apply(FuseRope(), body(*ANGLES, *uneven, *SUM)).count == 0
    overlapping = [ROTATED[0], "%x2 = slice %x {axis=3, start=3, stop=7} : f32[1,3,S,4]", *ROTATED[2:]]
    refuse(FuseRope(), body(*ANGLES, *overlapping, *SUM), "two halves")
    other = ["%y = exp %x : f32[1,3,S,8]", *[s.replace("slice %x", "slice %y") for s in ROTATED]]
    refuse(FuseRope(), body(*ANGLES, *other, *SUM), "another value is rotated")


def test_angles_that_differ_between_the_halves_are_refused() -> None:
    twice = ["%f2 = mul %f, 2.0 : f32[1,S,4]", "%ff = concat %f, %f2 {axis=2} : f32[1,S,8]", *ANGLES[1:]]
    refuse(FuseRope(), body(*twice, *ROTATED, *SUM), "not seen to repeat one half")


PART = [
    "%nn = concat %n, %n {axis=2} : f32[1,S,4]",
    "%cos = cos %nn : f32[1,S,4]",
    "%sin = sin %nn : f32[1,S,4]",
]


def part(start: int, *after: str) -> str:
    return body(
        *PART,
        f"%u = slice %x {{axis=3, start={start}, stop={start + 4}}} : f32[1,3,S,4]",
        "%x1 = slice %u {axis=3, start=0, stop=2} : f32[1,3,S,2]",
        "%x2 = slice %u {axis=3, start=2, stop=4} : f32[1,3,S,2]",
        "%m = neg %x2 : f32[1,3,S,2]",
        "%r = concat %m, %x1 {axis=3} : f32[1,3,S,4]",
        "%p = mul %u, %cos : f32[1,3,S,4]",
        "%q = mul %r, %sin : f32[1,3,S,4]",
        "%y = add %p, %q : f32[1,3,S,4]",
        *after,
    )


def test_a_rotated_part_and_the_rest_of_the_head() -> None:
    rest = "%t = slice %x {axis=3, start=4, stop=8} : f32[1,3,S,4]"
    join = "%z = concat %y, %t {axis=3} : f32[1,3,S,8]"
    assert kinds(part(0, rest, join)) == ["cos", "sin", "rope"]
    front = "%t = slice %x {axis=3, start=0, stop=4} : f32[1,3,S,4]"
    found = apply(FuseRope(), part(4, front, "%z = concat %t, %y {axis=3} : f32[1,3,S,8]"))
    assert found.graph.ops[-1].attrs == {"offset": 4}


def test_parts_joined_in_another_order_stay_apart() -> None:
    rest = "%t = slice %x {axis=3, start=4, stop=8} : f32[1,3,S,4]"
    found = apply(FuseRope(), part(0, rest, "%z = concat %t, %y {axis=3} : f32[1,3,S,8]"))
    assert [op.kind for op in found.graph.ops][-3:] == ["rope", "slice", "concat"]
    assert any("one head in order" in str(m) for m in found.misses)


def test_a_part_of_a_split_head_is_rotated_in_that_head() -> None:
    text = part(0, "%t = slice %x {axis=3, start=4, stop=8} : f32[1,3,S,4]")
    text = text.replace("return %z", "%z = concat %y, %t {axis=3} : f32[1,3,S,8] return %z")
    text = text.replace("%x: f32[1,3,S,8]", "%w: f32[1,3,S,24]")
    text = text.replace(
        "%nn =",
        "%k, %x, %v = split %w {axis=3, sizes=[8,8,8]} : f32[1,3,S,8], f32[1,3,S,8], f32[1,3,S,8] %nn =",
    )
    assert kinds(text) == ["split", "cos", "sin", "rope"]


def test_pairs_taken_from_the_projection_itself() -> None:
    """The reshape to heads and the reshape to pairs are one by then, so the whole head is made anew."""
    text = """graph @g(%x: f32[1,S,24], %f: f32[1,S,1,4]) dims {S: 1..64} {
    %cos = cos %f : f32[1,S,1,4]
    %sin = sin %f : f32[1,S,1,4]
    %h = reshape %x {shape=[1,S,3,8]} : f32[1,S,3,8]
    %hp = reshape %h {shape=[1,S,3,4,2]} : f32[1,S,3,4,2]
    %xa, %xb = split %hp {axis=4, sizes=[1,1]} : f32[1,S,3,4,1], f32[1,S,3,4,1]
    %x1 = reshape %xa {shape=[1,S,3,4]} : f32[1,S,3,4]
    %x2 = reshape %xb {shape=[1,S,3,4]} : f32[1,S,3,4]
    %a = mul %x1, %cos : f32[1,S,3,4]
    %b = mul %x2, %sin : f32[1,S,3,4]
    %c = mul %x1, %sin : f32[1,S,3,4]
    %d = mul %x2, %cos : f32[1,S,3,4]
    %e = sub %a, %b : f32[1,S,3,4]
    %g = add %c, %d : f32[1,S,3,4]
    %e1 = reshape %e {shape=[1,S,3,4,1]} : f32[1,S,3,4,1]
    %g1 = reshape %g {shape=[1,S,3,4,1]} : f32[1,S,3,4,1]
    %st = concat %e1, %g1 {axis=4} : f32[1,S,3,4,2]
    %z = reshape %st {shape=[1,S,3,8]} : f32[1,S,3,8]
    return %z
    }"""
    assert sorted(kinds(text)) == ["cos", "reshape", "reshape", "rope", "sin"]


def test_turned_pairs_cut_from_a_reshaped_head() -> None:
    turned = [
        "%xp = reshape %x {shape=[1,3,S,4,2]} : f32[1,3,S,4,2]",
        "%m2 = slice %xp {axis=4, start=0, stop=1} : f32[1,3,S,4,1]",
        "%x2 = slice %xp {axis=4, start=1, stop=2} : f32[1,3,S,4,1]",
        "%x2r = reshape %x2 {shape=[1,3,S,4]} : f32[1,3,S,4]",
        "%m = neg %x2r : f32[1,3,S,4]",
        "%m1 = reshape %m {shape=[1,3,S,4,1]} : f32[1,3,S,4,1]",
        *TURNED[5:],
    ]
    assert kinds(body(*REPEATED["stack"], *ANGLES[1:], *turned, *SUM))[-1] == "rope"
    swapped = [*turned[:1], turned[1].replace("0, stop=1", "1, stop=2"), *turned[2:]]
    refuse(FuseRope(), body(*REPEATED["stack"], *ANGLES[1:], *swapped, *SUM), "two halves")
