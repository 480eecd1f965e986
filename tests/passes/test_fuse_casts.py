"""fuse_casts: casts to bf16 become the result type of the op before them, unless something else reads it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from ir.dims import symbol
from ir.graph import Graph
from ir.interpret import empty_kv, interpret
from ir.text import print_graph
from ir.types import KV
from ir.verify import verify
from passes.fuse_casts import FuseCasts
from passes.plan_memory import PlanMemory
from tests.passes.checks import apply, expect, graph_text, random_weights, read, refuse

HEAD = "graph @g(%x: f32[T,8], %r: f32[T,8], %rows: i32[S]) dims {T: 1..64, S: 0..64} {"
body = partial(graph_text, HEAD)
CAST = '%z = cast %y {dtype="bf16"} : bf16[T,8]'
MAKERS = {
    "rms_norm": "%y = rms_norm %x, @w: f32[8] {eps=1e-05} : f32[T,8]",
    "layer_norm": "%y = layer_norm %x, @w: f32[8], @b: f32[8] {eps=1e-05} : f32[T,8]",
    "linear": "%y = linear %x, @w: f32[8,8] : f32[T,8]",
    "residual": '%y = linear %x, @w: f32[8,8], @b: f32[8], %r {activation="silu"} : f32[T,8]',
    "gated": '%y = linear %x, @w: f32[16,8] {activation="silu", gated=true} : f32[T,8]',
    "typed": '%y = linear %x, @w: f32[8,8] {dtype="f32"} : f32[T,8]',
}


@pytest.mark.parametrize("name", MAKERS)
def test_the_op_rounds_its_result_itself(name: str) -> None:
    """In float64 and, bit for bit, in float32."""
    before = body(MAKERS[name], CAST)
    found = apply(FuseCasts(), before, rtol=0)
    (op,) = found.graph.ops
    assert found.count == 1 and op.attr("dtype") == "bf16" and op.out.name == "z"
    assert {**op.attrs, "dtype": None} == {**read(before).ops[0].attrs, "dtype": None}


def test_a_norm() -> None:
    expect(
        FuseCasts(),
        body(MAKERS["rms_norm"] + " // norm", CAST + " // q"),
        body('%z = rms_norm %x, @w: f32[8] {eps=1e-05, dtype="bf16"} : bf16[T,8] // norm'),
        rtol=0,
    )


def test_chosen_rows_of_a_reshaped_value() -> None:
    expect(
        FuseCasts(),
        body(
            "%y = linear %x, @w: f32[8,8] : f32[T,8]",
            "%h = reshape %y {shape=[T,2,4]} : f32[T,2,4]",
            "%t = take_rows %h, %rows : f32[S,2,4]",
            '%z = cast %t {dtype="bf16"} : bf16[S,2,4]',
        ),
        body(
            '%y.bf16 = linear %x, @w: f32[8,8] {dtype="bf16"} : bf16[T,8]',
            "%h.bf16 = reshape %y.bf16 {shape=[T,2,4]} : bf16[T,2,4]",
            "%z = take_rows %h.bf16, %rows : bf16[S,2,4]",
        ),
        rtol=0,
    )


KV_TYPE = "kv[full: k f32[2,4], v f32[2,4]; block 4; layers 1]"
ATTENTION = f"""graph @g(%x: f32[T,16], %starts: i32[R+1], %lens: i32[R], %kv0: {KV_TYPE}, %slots0: i32[T],
    %table0: i32[R,M0]) dims {{T: 1.., R: 1.., M0: 1..}} {{
  %q = reshape %x {{shape=[T,4,4]}} : f32[T,4,4]
  %h = reshape %x {{shape=[T,2,8]}} : f32[T,2,8]
  %k, %v = split %h {{axis=2, sizes=[4,4]}} : f32[T,2,4], f32[T,2,4]
  %kv1 = kv_write %kv0, %k, %v, %slots0 {{layer=0}} : {KV_TYPE}
  %o = paged_attention %q, %kv1, %table0, %lens, %starts {{layer=0, scale=0.5, mask=k <= q}} : f32[T,4,4]
  %flat = reshape %o {{shape=[T,16]}} : f32[T,16]
  %narrow = cast %flat {{dtype="bf16"}} : bf16[T,16]
  %z = linear %narrow, @w: bf16[8,16] {{dtype="f32"}} : f32[T,8]
  return %z, %kv1
}}"""


def test_attention_stores_bf16_that_the_output_linear_reads_in_place() -> None:
    before = read(ATTENTION)
    after = FuseCasts().run(before).graph
    verify(after)
    assert [line.strip() for line in print_graph(after).splitlines()[5:8]] == [
        "%o.bf16 = paged_attention %q, %kv1, %table0, %lens, %starts"
        ' {layer=0, scale=0.5, mask=k <= q, dtype="bf16"} : bf16[T,4,4]',
        "%narrow = reshape %o.bf16 {shape=[T, 16]} : bf16[T,16]",
        '%z = linear %narrow, @w: bf16[8,16] {dtype="f32"} : f32[T,8]',
    ]
    expected, found = (interpret(g, step(before), random_weights(before)).outputs[0] for g in (before, after))
    assert np.array_equal(expected, found) and np.std(found) > 0

    planned = PlanMemory().run(after).graph
    attention, flat = (op for op in planned.ops if op.outs[0].name in ("o.bf16", "narrow"))
    place = attention.attr("at")[0]
    assert flat.attr("at") == (place,) and planned.arena[place] == 2 * 16 * symbol("T")


def step(graph: Graph) -> dict[str, Any]:
    """Three tokens of one request."""
    (kv,) = (v.type for v in graph.inputs if isinstance(v.type, KV))
    x = np.random.default_rng(0).standard_normal((3, 16)).astype(np.float32)
    vectors = {"starts": [0, 3], "lens": [3], "slots0": [4, 5, 6], "table0": [[1]]}
    return {"x": x, "kv0": empty_kv(kv, 2), **{n: np.array(a, np.int32) for n, a in vectors.items()}}


Y = MAKERS["rms_norm"]
MISSES = [
    [
        Y,
        '%n = cast %y {dtype="bf16"} : bf16[T,8]',
        '%w = cast %n {dtype="f32"} : f32[T,8]',
        "%z = sub %y, %w : f32[T,8]",
    ],
    [
        Y,
        "%h = reshape %y {shape=[T,2,4]} : f32[T,2,4]",
        '%n = cast %h {dtype="bf16"} : bf16[T,2,4]',
        '%w = cast %n {dtype="f32"} : f32[T,2,4]',
        "%m = reshape %w {shape=[T,8]} : f32[T,8]",
        "%z = sub %y, %m : f32[T,8]",
    ],
]


@pytest.mark.parametrize("lines", MISSES)
def test_a_value_with_another_reader_keeps_its_cast(lines: list[str]) -> None:
    refuse(FuseCasts(), body(*lines), "read elsewhere too")


@pytest.mark.parametrize(
    "lines",
    [
        ["%y = exp %x : f32[T,8]", CAST],
        ["%y = transpose %x {perm=[1,0]} : f32[8,T]", '%z = cast %y {dtype="bf16"} : bf16[8,T]'],
        [Y, '%z = cast %y {dtype="i32"} : i32[T,8]'],
        ['%y = cast %x {dtype="bf16"} : bf16[T,8]', '%z = cast %y {dtype="f32"} : f32[T,8]'],
    ],
)
def test_what_is_no_rounding_of_such_an_op_stays(lines: list[str]) -> None:
    assert apply(FuseCasts(), body(*lines)).count == 0
