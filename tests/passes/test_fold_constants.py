"""fold_constants: what is known folds, and what depends on weights or the sequence length does not."""

from __future__ import annotations

import numpy as np

from ir.text.printer import print_graph
from passes.fold_constants import FoldConstants
from tests.passes.checks import apply, expect, read

HEAD = "graph @g(%x: f32[S,4]) dims {S: 1..64} {"


def test_arithmetic_on_constants_is_that_of_f32() -> None:
    found = apply(
        FoldConstants(),
        HEAD
        + """
        %a = full {shape=[], value=0.1, dtype="f32"} : f32[]
        %b = mul %a, 3.0 : f32[]
        %c = sqrt %b : f32[]
        %z = mul %x, %c : f32[S,4]
        return %z
        }""",
        rtol=1e-6,
    )
    (full, _) = found.graph.ops
    assert full.attr("value") == float(np.sqrt(np.float32(0.1) * np.float32(3.0)))


def test_moves_and_fixed_sizes_fold() -> None:
    expect(
        FoldConstants(),
        HEAD
        + """
        %a = full {shape=[1], value=2.0, dtype="f32"} : f32[1]
        %b = expand %a {shape=[S,4]} : f32[S,4]
        %d = dim {size=6, dtype="i32"} : i32[]
        %e = add %d, 1 : i32[]
        %f = cast %e {dtype="f32"} : f32[]
        %y = mul %x, %b : f32[S,4]
        %z = div %y, %f : f32[S,4]
        return %z
        }""",
        HEAD
        + """
        %b = full {shape=[S,4], value=2.0, dtype="f32"} : f32[S,4]
        %f = full {shape=[], value=7.0, dtype="f32"} : f32[]
        %y = mul %x, %b : f32[S,4]
        %z = div %y, %f : f32[S,4]
        return %z
        }""",
    )


def test_where_and_logic_with_a_known_side() -> None:
    expect(
        FoldConstants(),
        "graph @g(%x: f32[S,4], %m: bool[S,4]) dims {S: 1..64} {"
        + """
        %t = full {shape=[4], value=true, dtype="bool"} : bool[4]
        %a = and %m, %t : bool[S,4]
        %b = or %t, %m : bool[S,4]
        %y = where %a, %x, 0.0 : f32[S,4]
        %n = not %b : bool[S,4]
        %z = where %n, 1.0, %y : f32[S,4]
        return %z
        }""",
        "graph @g(%x: f32[S,4], %m: bool[S,4]) dims {S: 1..64} {"
        + """
        %z = where %m, %x, 0.0 : f32[S,4]
        return %z
        }""",
    )


def test_sequence_length_and_weights_do_not_fold() -> None:
    text = (
        HEAD
        + """
        %d = dim {size=S, dtype="f32"} : f32[]
        %l = log %d : f32[]
        %w = add @w: f32[4], 1.0 : f32[4]
        %y = mul %x, %w : f32[S,4]
        %z = mul %y, %l : f32[S,4]
        return %z
        }"""
    )
    assert print_graph(apply(FoldConstants(), text).graph) == print_graph(read(text))
