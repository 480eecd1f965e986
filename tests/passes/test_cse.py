"""cse: what counts as equal, what does not, and whose name and loc are kept."""

from __future__ import annotations

from passes.cse import Cse
from tests.passes.checks import apply, expect


def test_equal_ops_are_one_and_the_first_loc_stays() -> None:
    expect(
        Cse(),
        """graph @g(%x: f32[S,4]) dims {S: 1..9} {
        %a = add %x, @b: f32[4] : f32[S,4] // first
        %b = add @b: f32[4], %x : f32[S,4] // second
        %c = exp %a : f32[S,4]
        %d = exp %b : f32[S,4]
        %z = sub %c, %d : f32[S,4]
        %y = add %c, %z : f32[S,4]
        return %y
        }""",
        """graph @g(%x: f32[S,4]) dims {S: 1..9} {
        %a = add %x, @b: f32[4] : f32[S,4] // first
        %c = exp %a : f32[S,4]
        %z = sub %c, %c : f32[S,4]
        %y = add %c, %z : f32[S,4]
        return %y
        }""",
    )


def test_weight_ops_and_splits_and_defaults() -> None:
    found = apply(
        Cse(),
        """graph @g(%x: f32[S,4]) dims {S: 1..9} {
        %w = add @w: f32[4], 1.0 : f32[4]
        %v = add @w: f32[4], 1.0 : f32[4]
        %a = rms_norm %x, %w {eps=1e-05} : f32[S,4]
        %b = rms_norm %x, %v {eps=1e-05, rank=1} : f32[S,4]
        %p, %q = split %a {axis=1, sizes=[1,3]} : f32[S,1], f32[S,3]
        %r, %s = split %b {axis=1, sizes=[1,3]} : f32[S,1], f32[S,3]
        %z = sub %q, %r : f32[S,3]
        return %z
        }""",
    )
    assert [op.kind for op in found.graph.ops] == ["add", "rms_norm", "split", "sub"]
    assert found.count == 3


def test_literals_of_other_types_orders_and_attributes_differ() -> None:
    found = apply(
        Cse(),
        """graph @g(%x: f32[S,4], %i: i32[S]) dims {S: 1..9} {
        %a = sub %x, 1.0 : f32[S,4]
        %b = sub 1.0, %x : f32[S,4]
        %c = rms_norm %x {eps=1e-05} : f32[S,4]
        %d = rms_norm %x {eps=1e-06} : f32[S,4]
        %e = cast %i {dtype="f32"} : f32[S]
        %f = cast %i {dtype="bf16"} : bf16[S]
        return %a, %b, %c, %d, %e, %f
        }""",
        rtol=1e-2,
    )
    assert found.count == 0


def test_an_output_equal_to_an_earlier_value_keeps_its_name() -> None:
    expect(
        Cse(),
        """graph @g(%x: f32[S,4]) dims {S: 1..9} {
        %a = exp %x : f32[S,4]
        %b = neg %a : f32[S,4]
        %logits = exp %x : f32[S,4]
        return %b, %logits
        }""",
        """graph @g(%x: f32[S,4]) dims {S: 1..9} {
        %logits = exp %x : f32[S,4]
        %b = neg %logits : f32[S,4]
        return %b, %logits
        }""",
    )
