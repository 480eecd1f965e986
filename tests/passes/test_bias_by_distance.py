"""fuse_attention: what is added to scores by distance becomes a table; what is not by distance is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ir.graph import Graph, Op, tensor_of
from ir.interpret import interpret
from ir.text import parse
from ir.text.expressions import expression
from passes.base import PassError
from passes.fuse_attention import FuseAttention
from tests.passes.test_fuse_attention import (
    BESIDE_SINKS,
    CAUSAL,
    CONTEXT,
    FINISH,
    POSITIONS,
    SCORES,
    fuse,
    graph_text,
    random_inputs,
)

RNG = np.random.default_rng(0)
ROWS, SHORT = RNG.standard_normal((32, 4)).astype(np.float32), RNG.standard_normal(32).astype(np.float32)
WIDE = RNG.standard_normal((1, 4, 100)).astype(np.float32)
RATES, POWERS = (RNG.random(4).astype(np.float32) + 0.2 for _ in range(2))
WEIGHTS = {"rows": ROWS, "short": SHORT, "wide": WIDE, "rates": RATES, "powers": POWERS}

CLAMPED = "%cl = clamp %d {low=0, high=31} : i32[S,S]"
ADDED = ["%x = add %ss, %b : f32[1,4,S,S]", "%w = where %m, %x, -inf : f32[1,4,S,S]"]
PER_HEAD = [
    "%r = reshape @rates: f32[4] {shape=[4,1,1]} : f32[4,1,1]",
    "%p0 = reshape @powers: f32[4] {shape=[4,1,1]} : f32[4,1,1]",
    "%ad = abs %d : i32[S,S]",
    '%f = cast %ad {dtype="f32"} : f32[S,S]',
]


def t5_bucket(d: int) -> int:
    """Of 32 buckets and distances up to 128 (arXiv 1910.10683, 2.1)."""
    return d if d < 16 else min(31, 16 + int(math.log(d / 16) / math.log(128 / 16) * 16))


Expected = Callable[[int, int], float]  # head, distance

FORMS: dict[str, tuple[list[str], Expected, int]] = {
    "buckets": (
        [
            "%nd = sub %ik, %iq : i32[S,S]", "%lo = minimum %nd, 0 : i32[S,S]", "%rel = neg %lo : i32[S,S]",
            "%small = lt %rel, 16 : bool[S,S]", '%f = cast %rel {dtype="f32"} : f32[S,S]',
            "%g = div %f, 16.0 : f32[S,S]", "%l = log %g : f32[S,S]",
            f"%n = div %l, {math.log(8)} : f32[S,S]", "%t = mul %n, 16.0 : f32[S,S]",
            '%c = cast %t {dtype="i32"} : i32[S,S]', "%large = add %c, 16 : i32[S,S]",
            "%most = minimum %large, 31 : i32[S,S]", "%bucket = where %small, %rel, %most : i32[S,S]",
            "%e = embed %bucket, @rows: f32[32,4] : f32[S,S,4]",
            "%tr = transpose %e {perm=[2,0,1]} : f32[4,S,S]",
            "%b = reshape %tr {shape=[1,4,S,S]} : f32[1,4,S,S]", *ADDED,
        ],
        lambda h, d: ROWS[t5_bucket(d), h], 78,
    ),
    "clamped, the same for all heads": (
        [CLAMPED, "%b = take @short: f32[32], %cl {axis=0} : f32[S,S]", *ADDED],
        lambda h, d: SHORT[min(d, 31)], 32,
    ),
    "a row for each head": (
        ["%ad = abs %d : i32[S,S]", "%t = take @wide: f32[1,4,100], %ad {axis=2} : f32[1,4,S,S]",
         "%b = mul %t, 0.5 : f32[1,4,S,S]", *ADDED],
        lambda h, d: 0.5 * WIDE[0, h, d], CONTEXT,
    ),
    "two heads share a row": (
        ["%ad = abs %d : i32[S,S]",
         "%sl = slice @wide: f32[1,4,100] {axis=1, start=1, stop=3} : f32[1,2,100]",
         "%t = take %sl, %ad {axis=2} : f32[1,2,S,S]",
         "%t1 = reshape %t {shape=[1,2,1,S,S]} : f32[1,2,1,S,S]",
         "%t2 = expand %t1 {shape=[1,2,2,S,S]} : f32[1,2,2,S,S]",
         "%b = reshape %t2 {shape=[1,4,S,S]} : f32[1,4,S,S]", *ADDED],
        lambda h, d: WIDE[0, 1 + h // 2, d], CONTEXT,
    ),
    "logarithms": (
        [*PER_HEAD, "%pf = mul %p0, %f : f32[4,S,S]", "%o = add %pf, 1.0 : f32[4,S,S]",
         "%l = log %o : f32[4,S,S]", "%rl = mul %r, %l : f32[4,S,S]", "%b = neg %rl : f32[4,S,S]", *ADDED],
        lambda h, d: -RATES[h] * math.log(1 + POWERS[h] * d), CONTEXT,
    ),
    "powers": (
        [*PER_HEAD, "%pw = pow %f, %p0 : f32[4,S,S]", "%rl = mul %r, %pw : f32[4,S,S]",
         "%x = sub %ss, %rl : f32[1,4,S,S]", "%w = where %m, %x, -inf : f32[1,4,S,S]"],
        lambda h, d: -RATES[h] * d ** float(POWERS[h]), CONTEXT,
    ),
    "squares": (
        ["%dd = mul %d, %d : i32[S,S]", '%f = cast %dd {dtype="f32"} : f32[S,S]',
         "%b = mul %f, -0.01 : f32[S,S]", *ADDED],
        lambda h, d: -0.01 * d * d, CONTEXT,
    ),
    "an array made of distances, at distances": (
        ['%f = cast %i {dtype="f32"} : f32[S]', "%g = mul %f, 0.1 : f32[S]", "%l = sin %g : f32[S]",
         "%ad = abs %d : i32[S,S]", "%b = take %l, %ad {axis=0} : f32[S,S]", *ADDED],
        lambda h, d: math.sin(0.1 * d), CONTEXT,
    ),
    "slopes and a table": (
        [CLAMPED, "%t = take @short: f32[32], %cl {axis=0} : f32[S,S]",
         "%sl = reshape @rates: f32[4] {shape=[4,1,1]} : f32[4,1,1]",
         '%f = cast %ik {dtype="f32"} : f32[1,S]', "%sk = mul %sl, %f : f32[4,1,S]",
         "%y = add %ss, %sk : f32[1,4,S,S]", "%x = add %y, %t : f32[1,4,S,S]",
         "%w = where %m, %x, -inf : f32[1,4,S,S]"],
        lambda h, d: SHORT[min(d, 31)] - RATES[h] * d, CONTEXT,
    ),
    "two tables, scaled with the scores": (
        [CLAMPED, "%t = take @short: f32[32], %cl {axis=0} : f32[S,S]",
         "%e = embed %cl, @rows: f32[32,4] : f32[S,S,4]", "%tr = transpose %e {perm=[2,0,1]} : f32[4,S,S]",
         "%y = add %s, %t : f32[1,4,S,S]", "%z0 = sub %y, %tr : f32[1,4,S,S]",
         "%x = mul %z0, 0.25 : f32[1,4,S,S]", "%w = where %m, %x, -inf : f32[1,4,S,S]"],
        lambda h, d: (SHORT[min(d, 31)] - ROWS[min(d, 31), h]) / 4, 32,
    ),
    "in a mask that is added": (
        [CLAMPED, "%t = take @short: f32[32], %cl {axis=0} : f32[S,S]", "%later = gt %ik, %iq : bool[S,S]",
         "%b = where %later, -3.4028234663852886e+38, %t : f32[S,S]", "%w = add %ss, %b : f32[1,4,S,S]"],
        lambda h, d: SHORT[min(d, 31)], 32,
    ),
    "a mask of numbers besides": (
        [CLAMPED, "%t = take @short: f32[32], %cl {axis=0} : f32[S,S]",
         '%mf = cast %m {dtype="f32"} : f32[S,S]', "%left = sub 1.0, %mf : f32[S,S]",
         "%hide = mul %left, -10000.0 : f32[S,S]", "%b = add %t, %hide : f32[S,S]",
         "%w = add %ss, %b : f32[1,4,S,S]"],
        lambda h, d: SHORT[min(d, 31)], 32,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_becomes_a_table(name: str) -> None:
    lines, expected, count = FORMS[name]
    after = fuse(graph_text([*POSITIONS, *CAUSAL, *SCORES, *lines, *FINISH]), WEIGHTS)
    op = attention(after)
    assert mask(after) == "k <= q" and op.attr("scale") == 0.25
    got = table(after)
    want = np.array([[expected(h, d) for d in range(count)] for h in range(4)])
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def attention(graph: Graph) -> Op:
    (op,) = [op for op in graph.ops if op.kind == "attention"]
    return op


def mask(graph: Graph) -> str:
    return expression(attention(graph).attr("mask"))


def table(graph: Graph) -> Any:
    bias: Any = attention(graph).args[5]
    assert all(isinstance(size, int) for size in tensor_of(bias).shape)
    return interpret(graph, random_inputs(graph, 5), WEIGHTS, np.float64).values[bias.name]


def test_beside_a_window() -> None:
    lines = [
        CLAMPED, "%t = take @short: f32[32], %cl {axis=0} : f32[S,S]", "%near = lt %d, 9 : bool[S,S]",
        "%m2 = and %m, %near : bool[S,S]", "%x = add %ss, %t : f32[1,4,S,S]",
        "%w = where %m2, %x, -inf : f32[1,4,S,S]",
    ]  # fmt: skip
    after = fuse(graph_text([*POSITIONS, *CAUSAL, *SCORES, *lines, *FINISH]), WEIGHTS)
    assert mask(after) == "((q - k) < 9) & (k <= q)" and table(after).shape == (4, 32)


def test_a_window_that_is_part_of_what_is_added() -> None:
    """Low numbers of far keys hide them, and are none of the table's."""
    lines = [
        CLAMPED, "%t = take @short: f32[32], %cl {axis=0} : f32[S,S]", "%far = ge %d, 9 : bool[S,S]",
        "%t1 = where %far, -1e9, %t : f32[S,S]", "%later = gt %ik, %iq : bool[S,S]",
        "%b = where %later, -1e9, %t1 : f32[S,S]", "%w = add %ss, %b : f32[1,4,S,S]",
    ]  # fmt: skip
    after = fuse(graph_text([*POSITIONS, *CAUSAL, *SCORES, *lines, *FINISH]), WEIGHTS)
    assert mask(after) == "((q - k) < 9) & (k <= q)"
    np.testing.assert_allclose(table(after)[:, :9], np.broadcast_to(SHORT[:9], (4, 9)))


def test_beside_sinks() -> None:
    lines = [
        CLAMPED, "%t = take @short: f32[32], %cl {axis=0} : f32[S,S]", "%x = add %ss, %t : f32[1,4,S,S]",
        "%w = where %m, %x, -inf : f32[1,4,S,S]",
        "%s1 = reshape @rates: f32[4] {shape=[1,4,1,1]} : f32[1,4,1,1]",
        *BESIDE_SINKS,
    ]  # fmt: skip
    after = fuse(graph_text([*POSITIONS, *CAUSAL, *SCORES, *lines]), WEIGHTS)
    assert attention(after).args[4] is not None and table(after).shape == (4, 32)


def test_in_the_mask_of_an_attention_op() -> None:
    lines = [
        CLAMPED, "%e = embed %cl, @rows: f32[32,4] : f32[S,S,4]",
        "%tr = transpose %e {perm=[2,0,1]} : f32[4,S,S]", "%later = gt %ik, %iq : bool[S,S]",
        "%b0 = where %later, -inf, %tr : f32[4,S,S]", "%b = reshape %b0 {shape=[1,4,S,S]} : f32[1,4,S,S]",
        "%z = attention %q, %k, %v, %b {scale=0.25} : f32[1,S,4,8]",
    ]  # fmt: skip
    after = fuse(graph_text([*POSITIONS, *lines]), WEIGHTS)
    assert mask(after) == "k <= q"
    np.testing.assert_allclose(table(after), ROWS.T)


REFUSED: dict[str, list[str]] = {
    "q + k": [
        "%sum = add %iq, %ik : i32[S,S]", "%cl = clamp %sum {low=0, high=31} : i32[S,S]",
        "%b = take @short: f32[32], %cl {axis=0} : f32[S,S]", *ADDED,
    ],
    "2q - k": [
        "%qq = mul %iq, 2 : i32[S,1]", "%dd = sub %qq, %ik : i32[S,S]",
        "%cl = clamp %dd {low=0, high=31} : i32[S,S]",
        "%b = take @short: f32[32], %cl {axis=0} : f32[S,S]", *ADDED,
    ],
    "q // 2 - k // 2": [
        "%q2 = floordiv %iq, 2 : i32[S,1]", "%k2 = floordiv %ik, 2 : i32[1,S]",
        "%dd = sub %q2, %k2 : i32[S,S]",
        "%cl = clamp %dd {low=0, high=31} : i32[S,S]",
        "%b = take @short: f32[32], %cl {axis=0} : f32[S,S]", *ADDED,
    ],
    "counted from the length": [
        "%n = dim {size=S} : i32[]", "%dd = sub %n, %d : i32[S,S]",
        "%cl = clamp %dd {low=0, high=31} : i32[S,S]",
        "%b = take @short: f32[32], %cl {axis=0} : f32[S,S]", *ADDED,
    ],
    "times something of the key's token": [
        CLAMPED, "%t = take @short: f32[32], %cl {axis=0} : f32[S,S]",
        "%kt1 = slice %kt {axis=2, start=0, stop=1} : f32[1,4,1,S]",
        "%b = mul %t, %kt1 : f32[1,4,S,S]", *ADDED,
    ],
    "no number at a distance": [
        CLAMPED, "%b = take @bad: f32[32], %cl {axis=0} : f32[S,S]", *ADDED,
    ],
    "nothing hides later keys": [
        CLAMPED, "%b = take @short: f32[32], %cl {axis=0} : f32[S,S]", "%w = add %ss, %b : f32[1,4,S,S]",
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_by_distance_is_refused(name: str) -> None:
    bad = np.where(np.arange(32) == 7, np.nan, SHORT).astype(np.float32)
    graph = parse(graph_text([*POSITIONS, *CAUSAL, *SCORES, *REFUSED[name], *FINISH]))
    with pytest.raises(PassError):
        FuseAttention(read={**WEIGHTS, "bad": bad}.__getitem__).run(graph)


def test_a_bias_between_positions_alone_is_refused_without_data() -> None:
    lines, _, _ = FORMS["clamped, the same for all heads"]
    graph = parse(graph_text([*POSITIONS, *CAUSAL, *SCORES, *lines, *FINISH]))
    with pytest.raises(PassError, match="whose data only a compile from a checkpoint has"):
        FuseAttention().run(graph)
