"""fuse_attention: ways to write attention and its mask, what they become, and what is refused and where."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import sympy
from hypothesis import given, settings

from ir.build import GraphBuilder
from ir.dims import FloorDiv, symbol
from ir.graph import Graph, Op, Scalar, Value
from ir.interpret import interpret
from ir.predicates import KEY, QUERY
from ir.text import parse, print_graph
from ir.text.expressions import expression
from ir.types import DType, Tensor
from ir.verify import verify
from passes.attention import prover
from passes.base import PassError
from passes.dce import Dce
from passes.fuse_attention import FuseAttention
from tests.passes.test_mask_proof import grid, predicates

CONTEXT = 80
LENGTHS = (1, 15, 16, 17, 70)  # around a block, and past every constant used here
LOC = "model.layers.0.self_attn"

Arrays = Mapping[str, Any]


def graph_text(lines: list[str], inputs: str = "", out: str = "z", context: int = CONTEXT) -> str:
    heads = "f32[1,4,S,8]"
    given = inputs or f"%q: {heads}, %k: {heads}, %v: {heads}"
    return f"graph @g(%pos: i32[1,S], {given}) dims {{S: 1..{context}}} {{\n" + "\n".join(
        [*lines, f"return %{out}", "}"]
    )


POSITIONS = [
    "%i = iota {size=S} : i32[S]",
    "%iq = reshape %i {shape=[S,1]} : i32[S,1]",
    "%ik = reshape %i {shape=[1,S]} : i32[1,S]",
    "%d = sub %iq, %ik : i32[S,S]",
]
SCORES = [
    "%kt = transpose %k {perm=[0,1,3,2]} : f32[1,4,8,S]",
    "%s = matmul %q, %kt : f32[1,4,S,S]",
    "%ss = mul %s, 0.25 : f32[1,4,S,S]",
]
CAUSAL = ["%m = le %ik, %iq : bool[S,S]"]
HIDE = ["%w = where %m, %ss, -inf : f32[1,4,S,S]"]
BESIDE_SINKS = [  # %s1: of each head
    "%s2 = expand %s1 {shape=[1,4,S,1]} : f32[1,4,S,1]",
    "%c = concat %w, %s2 {axis=3} : f32[1,4,S,S + 1]",
    "%pc = softmax %c {axis=3} : f32[1,4,S,S + 1]",
    "%p = slice %pc {axis=3, start=0, stop=S} : f32[1,4,S,S]",
    "%z = matmul %p, %v : f32[1,4,S,8]",
]
FINISH = ["%p = softmax %w {axis=3} : f32[1,4,S,S] // " + LOC, "%z = matmul %p, %v : f32[1,4,S,8] // " + LOC]


def fuse(text: str, weights: Arrays | None = None, read: bool = True) -> Graph:
    """The fused graph without dead ops, once it is seen to verify, round-trip and settle."""
    before = parse(text)
    verify(before)
    step = FuseAttention(read=(weights or {}).__getitem__ if read else None)
    after = Dce().run(step.run(before).graph).graph
    verify(after)
    assert parse(print_graph(after)) == after
    again = step.run(after)
    assert again.count == 0
    assert_same_numbers(before, after, weights or {})
    return after


def assert_same_numbers(
    before: Graph, after: Graph, weights: Arrays, lengths: tuple[int, ...] = LENGTHS
) -> None:
    for length in lengths:
        inputs = random_inputs(before, length)
        (want,) = interpret(before, inputs, weights, np.float64).outputs
        (got,) = interpret(after, inputs, weights, np.float64).outputs
        assert want.std() > 0.01
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9)


def random_inputs(graph: Graph, length: int) -> dict[str, Any]:
    generator = np.random.default_rng(length)
    found: dict[str, Any] = {"pos": np.arange(length)[None]}
    for value in graph.inputs[1:]:
        shape = [length if d == symbol("S") else d for d in value.type.shape]  # type: ignore[union-attr]
        found[value.name] = 2 * generator.standard_normal(shape)
    return found


def attention(graph: Graph) -> Op:
    assert not [op for op in graph.ops if op.kind in ("softmax", "matmul", "where", "exp")]
    (op,) = [op for op in graph.ops if op.kind == "attention"]
    return op


def mask(graph: Graph) -> str:
    return expression(attention(graph).attr("mask"))


def test_written_out_attention_becomes_one_op() -> None:
    after = fuse(graph_text([*POSITIONS, *CAUSAL, *SCORES, *HIDE, *FINISH]))
    wanted = graph_text(
        [
            f"%a = attention %q, %k, %v {{mask=k <= q, scale=0.25}} : f32[1,S,4,8] // {LOC}",
            f"%z = transpose %a {{perm=[0,2,1,3]}} : f32[1,4,S,8] // {LOC}",
        ]
    )
    assert parse(print_graph(after).replace(f"%{attention(after).out.name}", "%a")) == parse(wanted)


WINDOW = "((q - k) < 8) & (k <= q)"
CHUNKS = "((k//8) == (q//8)) & (k <= q)"

MASKS: dict[str, tuple[list[str], str]] = {  # %m is true where a key is seen
    "causal by difference": (["%m = ge %d, 0 : bool[S,S]"], "k <= q"),
    "causal, negated": (["%n = gt %ik, %iq : bool[S,S]", "%m = not %n : bool[S,S]"], "k <= q"),
    "from the positions input": (
        [
            "%pq = reshape %pos {shape=[S,1]} : i32[S,1]",
            "%m = le %pos, %pq : bool[S,S]",
        ],
        "k <= q",
    ),
    "window": (
        [
            *CAUSAL[:0],
            "%c = le %ik, %iq : bool[S,S]",
            "%n = lt %d, 8 : bool[S,S]",
            "%m = and %c, %n : bool[S,S]",
        ],
        WINDOW,
    ),
    "window in floats": (
        [
            '%f = cast %d {dtype="f32"} : f32[S,S]',
            "%c = ge %f, 0.0 : bool[S,S]",
            "%n = le %f, 7.5 : bool[S,S]",
            "%m = and %c, %n : bool[S,S]",
        ],
        WINDOW,
    ),
    "window as wide as the context": (
        ["%c = le %ik, %iq : bool[S,S]", "%n = lt %d, 80 : bool[S,S]", "%m = and %c, %n : bool[S,S]"],
        "k <= q",
    ),
    "window one below the context": (
        ["%c = le %ik, %iq : bool[S,S]", "%n = lt %d, 79 : bool[S,S]", "%m = and %c, %n : bool[S,S]"],
        "((q - k) < 79) & (k <= q)",
    ),
    "chunks": (
        [
            "%a = floordiv %iq, 8 : i32[S,1]",
            "%b = floordiv %ik, 8 : i32[1,S]",
            "%e = eq %a, %b : bool[S,S]",
            "%c = le %ik, %iq : bool[S,S]",
            "%m = and %c, %e : bool[S,S]",
        ],
        CHUNKS,
    ),
    "chunks in floats": (
        [
            '%fq = cast %iq {dtype="f32"} : f32[S,1]',
            '%fk = cast %ik {dtype="f32"} : f32[1,S]',
            "%dq = div %fq, 8.0 : f32[S,1]",
            "%dk = mul %fk, 0.125 : f32[1,S]",
            "%a = floor %dq : f32[S,1]",
            "%b = floor %dk : f32[1,S]",
            "%e = eq %a, %b : bool[S,S]",
            "%c = le %fk, %fq : bool[S,S]",
            "%m = and %c, %e : bool[S,S]",
        ],
        CHUNKS,
    ),
    "a product of truths": (
        [
            "%c = le %ik, %iq : bool[S,S]",
            "%n = lt %d, 8 : bool[S,S]",
            '%x = cast %c {dtype="f32"} : f32[S,S]',
            '%y = cast %n {dtype="f32"} : f32[S,S]',
            "%xy = mul %x, %y : f32[S,S]",
            "%m = ne %xy, 0.0 : bool[S,S]",
        ],
        WINDOW,
    ),
    "every third key and its own": (
        [
            "%r = mod %ik, 3 : i32[1,S]",
            "%t = eq %r, 0 : bool[1,S]",
            "%c = lt %ik, %iq : bool[S,S]",
            "%a = and %t, %c : bool[S,S]",
            "%b = eq %ik, %iq : bool[S,S]",
            "%m = or %a, %b : bool[S,S]",
        ],
        "(((k - q) < 0) & (mod(k, 3) == 0)) | (k == q)",
    ),
    "a slice of larger positions, transposed and expanded": (
        [
            "%j = iota {size=80} : i32[80]",
            "%jk = slice %j {axis=0, start=0, stop=S} : i32[S]",
            "%x = expand %jk {shape=[S,S]} : i32[S,S]",
            "%y = transpose %x {perm=[1,0]} : i32[S,S]",
            "%m2 = le %x, %y : bool[S,S]",
            "%m = reshape %m2 {shape=[1,1,S,S]} : bool[1,1,S,S]",
        ],
        "k <= q",
    ),
    "positions counted up": (
        [
            '%o = full {shape=[S], value=1, dtype="i32"} : i32[S]',
            "%o2 = cumsum %o {axis=0} : i32[S]",
            "%j = sub %o2, 1 : i32[S]",
            "%m = le %j, %iq : bool[S,S]",
        ],
        "k <= q",
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_positions_become_predicates(name: str) -> None:
    lines, expected = MASKS[name]
    found = mask(fuse(graph_text([*POSITIONS, *lines, *SCORES, *HIDE, *FINISH])))
    assert found == expected or found == f"({expected}) & (k <= q)"


HIDINGS: dict[str, list[str]] = {  # how %m hides scores
    "added -inf": ["%b = where %m, %zero, -inf : f32[S,S]", "%w = add %ss, %b : f32[1,4,S,S]"],
    "added finfo.min": [
        "%b = where %m, %zero, -3.4028234663852886e+38 : f32[S,S]",
        "%w = add %ss, %b : f32[1,4,S,S]",
    ],
    "added twice": [
        "%b = where %m, %zero, -3.4028234663852886e+38 : f32[S,S]",
        "%w1 = add %ss, %b : f32[1,4,S,S]",
        "%w2 = add %w1, %b : f32[1,4,S,S]",
        "%w = maximum %w2, -3.4028234663852886e+38 : f32[1,4,S,S]",
    ],
    "one minus mask": [
        '%f = cast %m {dtype="f32"} : f32[S,S]',
        "%o = sub 1.0, %f : f32[S,S]",
        "%b = mul %o, -10000.0 : f32[S,S]",
        "%w = add %ss, %b : f32[1,4,S,S]",
    ],
    "log": [
        '%f = cast %m {dtype="f32"} : f32[S,S]',
        "%b = log %f : f32[S,S]",
        "%w = add %ss, %b : f32[1,4,S,S]",
    ],
    "multiplied away and lowered": [
        '%f = cast %m {dtype="f32"} : f32[S,S]',
        "%o = sub 1.0, %f : f32[S,S]",
        "%l = mul %o, -1e10 : f32[S,S]",
        "%x = mul %ss, %f : f32[1,4,S,S]",
        "%w = add %x, %l : f32[1,4,S,S]",
    ],
    "masked fill": ["%nm = not %m : bool[S,S]", "%w = where %nm, -1e9, %ss : f32[1,4,S,S]"],
    "largest taken off first": [
        "%w1 = where %m, %ss, -inf : f32[1,4,S,S]",
        "%x = max %w1 {axes=[3], keepdims=true} : f32[1,4,S,1]",
        "%w = sub %w1, %x : f32[1,4,S,S]",
    ],
}
ZERO = '%zero = full {shape=[], value=0.0, dtype="f32"} : f32[]'


@pytest.mark.parametrize("name", HIDINGS)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_ways_to_hide_a_score(name: str) -> None:
    lines = [*POSITIONS, *MASKS["window"][0], ZERO, *SCORES, *HIDINGS[name], *FINISH]
    assert mask(fuse(graph_text(lines))) == WINDOW


def test_a_window_is_not_taken_for_causal() -> None:
    """The graph computes something else without its window, so the tests above can fail."""
    windowed = parse(graph_text([*POSITIONS, *MASKS["window"][0], *SCORES, *HIDE, *FINISH]))
    causal = fuse(graph_text([*POSITIONS, *CAUSAL, *SCORES, *HIDE, *FINISH]))
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        assert_same_numbers(windowed, causal, {})


MASKED3 = ["%w = where %m, %ss, -inf : f32[4,S,S]", "%p = softmax %w {axis=2} : f32[4,S,S]"]
LAYOUTS: dict[str, tuple[str, list[str], str]] = {  # inputs, lines, the attention's operands and attributes
    "three axes": (
        "%q: f32[4,S,8], %k: f32[4,8,S], %v: f32[4,S,8]",
        ["%s = matmul %q, %k : f32[4,S,S]", "%ss = div %s, 4.0 : f32[4,S,S]", *MASKED3,
         "%z = matmul %p, %v : f32[4,S,8]"],
        "q [1,4,S,8] k [1,4,S,8] v [1,4,S,8] scale 0.25",
    ),
    "no head axis": (
        "%q: f32[1,S,8], %k: f32[1,S,8], %v: f32[1,S,6]",
        ["%kt = transpose %k {perm=[0,2,1]} : f32[1,8,S]", "%ss = matmul %q, %kt : f32[1,S,S]",
         "%w = where %m, %ss, -inf : f32[1,S,S]", "%p = softmax %w {axis=2} : f32[1,S,S]",
         "%z = matmul %p, %v : f32[1,S,6]"],
        "q [1,1,S,8] k [1,1,S,8] v [1,1,S,6] scale 1.0",
    ),
    "matrices": (
        "%q: f32[S,8], %k: f32[S,8], %v: f32[S,8]",
        ["%kt = transpose %k {perm=[1,0]} : f32[8,S]", "%ss = matmul %q, %kt : f32[S,S]",
         "%w = where %m, %ss, -inf : f32[S,S]", "%p = softmax %w {axis=1} : f32[S,S]",
         "%z = matmul %p, %v : f32[S,8]"],
        "q [1,1,S,8] k [1,1,S,8] v [1,1,S,8] scale 1.0",
    ),
    "scale on both sides": (
        "%q: f32[1,4,S,8], %k: f32[1,4,S,8], %v: f32[1,4,S,8]",
        ["%qs = mul %q, 0.5 : f32[1,4,S,8]", "%kt = transpose %k {perm=[0,1,3,2]} : f32[1,4,8,S]",
         "%ks = div %kt, 4.0 : f32[1,4,8,S]", "%ss = matmul %qs, %ks : f32[1,4,S,S]", *HIDE, *FINISH],
        "q [1,4,S,8] k [1,4,S,8] v [1,4,S,8] scale 0.125",
    ),
    "softcap": (
        "%q: f32[1,4,S,8], %k: f32[1,4,S,8], %v: f32[1,4,S,8]",
        [*SCORES[:2], "%c1 = mul %s, 0.25 : f32[1,4,S,S]", "%c2 = div %c1, 2.0 : f32[1,4,S,S]",
         "%c3 = tanh %c2 : f32[1,4,S,S]", "%ss = mul %c3, 2.0 : f32[1,4,S,S]", *HIDE, *FINISH],
        "q [1,4,S,8] k [1,4,S,8] v [1,4,S,8] scale 0.25 softcap 2.0",
    ),
    "repeated keys and values": (
        "%q: f32[1,4,S,8], %k2: f32[1,2,S,8], %v2: f32[1,2,S,8]",
        ["%k3 = reshape %k2 {shape=[1,2,1,S,8]} : f32[1,2,1,S,8]",
         "%k4 = expand %k3 {shape=[1,2,2,S,8]} : f32[1,2,2,S,8]",
         "%k = reshape %k4 {shape=[1,4,S,8]} : f32[1,4,S,8]",
         "%v3 = reshape %v2 {shape=[1,2,1,S,8]} : f32[1,2,1,S,8]",
         "%v4 = expand %v3 {shape=[1,2,2,S,8]} : f32[1,2,2,S,8]",
         "%v = reshape %v4 {shape=[1,4,S,8]} : f32[1,4,S,8]",
         *SCORES, *HIDE, *FINISH],
        "q [1,4,S,8] k [1,2,S,8] v [1,2,S,8] scale 0.25",
    ),
    "grouped queries": (
        "%q: f32[1,2,2,S,8], %k: f32[1,2,1,8,S], %v: f32[1,2,1,S,8]",
        ["%ss = matmul %q, %k : f32[1,2,2,S,S]", "%w = where %m, %ss, -inf : f32[1,2,2,S,S]",
         "%p = softmax %w {axis=4} : f32[1,2,2,S,S]", "%z = matmul %p, %v : f32[1,2,2,S,8]"],
        "q [1,4,S,8] k [1,2,S,8] v [1,2,S,8] scale 1.0",
    ),
    "one key head": (
        "%q: f32[1,S,32], %k: f32[1,S,8], %v: f32[1,S,8]",
        ["%q1 = reshape %q {shape=[1,S,4,8]} : f32[1,S,4,8]",
         "%q2 = transpose %q1 {perm=[0,2,1,3]} : f32[1,4,S,8]",
         "%k1 = reshape %k {shape=[1,1,S,8]} : f32[1,1,S,8]",
         "%k2 = transpose %k1 {perm=[0,1,3,2]} : f32[1,1,8,S]",
         "%v1 = reshape %v {shape=[1,1,S,8]} : f32[1,1,S,8]", "%ss = matmul %q2, %k2 : f32[1,4,S,S]", *HIDE,
         "%p = softmax %w {axis=3} : f32[1,4,S,S]", "%z = matmul %p, %v1 : f32[1,4,S,8]"],
        "q [1,4,S,8] k [1,1,S,8] v [1,1,S,8] scale 1.0",
    ),
    "keys times queries": (
        "%q: f32[1,4,S,8], %k: f32[1,4,S,8], %v: f32[1,4,S,8]",
        ["%qt = transpose %q {perm=[0,1,3,2]} : f32[1,4,8,S]", "%s = matmul %k, %qt : f32[1,4,S,S]",
         "%ss = transpose %s {perm=[0,1,3,2]} : f32[1,4,S,S]", *HIDE, *FINISH],
        "q [1,4,S,8] k [1,4,S,8] v [1,4,S,8] scale 1.0",
    ),
    "softmax written out": (
        "%q: f32[1,4,S,8], %k: f32[1,4,S,8], %v: f32[1,4,S,8]",
        [*SCORES, *HIDE, "%x = max %w {axes=[3], keepdims=true} : f32[1,4,S,1]",
         "%y = sub %w, %x : f32[1,4,S,S]",
         "%e = exp %y : f32[1,4,S,S]", "%t = sum %e {axes=[3], keepdims=true} : f32[1,4,S,1]",
         "%p = div %e, %t : f32[1,4,S,S]", "%z = matmul %p, %v : f32[1,4,S,8]"],
        "q [1,4,S,8] k [1,4,S,8] v [1,4,S,8] scale 0.25",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name: str) -> None:
    inputs, lines, expected = LAYOUTS[name]
    op = attention(fuse(graph_text([*POSITIONS, *CAUSAL, *lines], inputs)))
    shapes = [f"{n} {sizes_of(a)}" for n, a in zip("qkv", op.args, strict=False)]
    attrs = [f"{n} {op.attr(n)}" for n in ("scale", "softcap") if n in op.attrs]
    assert " ".join([*shapes, *attrs]) == expected


def sizes_of(arg: Any) -> str:
    return f"[{','.join(expression(d) for d in arg.type.shape)}]"


SLOPES = np.array([0.5, 0.25, 0.125, 0.0625])
BIASES: dict[str, list[str]] = {
    "slope * (k - q)": ["%e = sub %ik, %iq : i32[S,S]", '%f = cast %e {dtype="f32"} : f32[S,S]',
                        "%b = mul %sl, %f : f32[4,S,S]"],
    "slope * k": ['%f = cast %ik {dtype="f32"} : f32[1,S]', "%b = mul %sl, %f : f32[4,1,S]"],
    "- slope * (q - k)": ['%f = cast %d {dtype="f32"} : f32[S,S]', "%n = mul %sl, %f : f32[4,S,S]",
                          "%b = neg %n : f32[4,S,S]"],
    "- slope * |q - k|": ["%ad = abs %d : i32[S,S]", '%f = cast %ad {dtype="f32"} : f32[S,S]',
                          "%n = mul %sl, %f : f32[4,S,S]", "%b = neg %n : f32[4,S,S]"],
}  # fmt: skip


@pytest.mark.parametrize("name", BIASES)
def test_alibi_becomes_slopes(name: str) -> None:
    lines = [*POSITIONS, *CAUSAL, "%sl = reshape @slopes: f32[4] {shape=[4,1,1]} : f32[4,1,1]", *BIASES[name]]
    shape = "f32[4,1,S]" if name == "slope * k" else "f32[4,S,S]"
    assert shape in lines[-1]
    after = fuse(
        graph_text([*lines, *SCORES, "%x = add %ss, %b : f32[1,4,S,S]",
                    "%w = where %m, %x, -inf : f32[1,4,S,S]", *FINISH]),
        {"slopes": SLOPES.astype(np.float32)},
    )  # fmt: skip
    op = attention(after)
    slopes = interpret(after, random_inputs(after, 5), {"slopes": SLOPES}, np.float64)
    assert np.array_equal(slopes.values[op.args[5].name], SLOPES)  # type: ignore[union-attr]


def test_sinks() -> None:
    lines = [
        *POSITIONS, *CAUSAL, *SCORES, *HIDE,
        "%s1 = reshape @sinks: f32[4] {shape=[1,4,1,1]} : f32[1,4,1,1]",
        *BESIDE_SINKS,
    ]  # fmt: skip
    op = attention(fuse(graph_text(lines), {"sinks": np.array([1.0, -2.0, 0.5, 3.0], np.float32)}))
    assert op.args[3] is None and op.args[4] is not None and expression(op.attr("mask")) == "k <= q"


LOWER = np.tril(np.ones((CONTEXT, CONTEXT), bool))
HOLES = LOWER & (np.random.default_rng(3).random((CONTEXT, CONTEXT)) < 0.5) | np.eye(CONTEXT, dtype=bool)
READS: dict[str, list[str]] = {
    "sliced": [
        "%t1 = slice @table: bool[80,80] {axis=0, start=0, stop=S} : bool[S,80]",
        "%m = slice %t1 {axis=1, start=0, stop=S} : bool[S,S]",
    ],
    "sliced, four axes": [
        "%t0 = reshape @table: bool[80,80] {shape=[1,1,80,80]} : bool[1,1,80,80]",
        "%t1 = slice %t0 {axis=2, start=0, stop=S} : bool[1,1,S,80]",
        "%m = slice %t1 {axis=3, start=0, stop=S} : bool[1,1,S,S]",
    ],
    "taken at positions": [
        "%t1 = take @table: bool[80,80], %i {axis=0} : bool[S,80]",
        "%m = take %t1, %i {axis=1} : bool[S,S]",
    ],
    "taken at the positions input": [
        "%p1 = reshape %pos {shape=[S]} : i32[S]",
        "%t1 = take @table: bool[80,80], %p1 {axis=0} : bool[S,80]",
        "%m = take %t1, %p1 {axis=1} : bool[S,S]",
    ],
    "flat": [
        "%t0 = reshape @table: bool[80,80] {shape=[6400]} : bool[6400]",
        "%r = mul %iq, 80 : i32[S,1]",
        "%n = add %r, %ik : i32[S,S]",
        "%m = take %t0, %n {axis=0} : bool[S,S]",
    ],
}


@pytest.mark.parametrize("name", READS)
def test_tables_of_truth_values(name: str) -> None:
    lines = [*POSITIONS, *READS[name], *SCORES, *HIDE, *FINISH]
    op = attention(fuse(graph_text(lines), {"table": HOLES}))
    assert expression(op.attr("mask")) == "(Table(0, q, k)) & (k <= q)"
    assert [a.name for a in op.args[6:]] == ["table"]  # type: ignore[union-attr]
    assert mask(fuse(graph_text(lines), {"table": LOWER})) == "k <= q"
    assert mask(fuse(graph_text(lines), {"table": LOWER & ~np.tril(LOWER, -8)})) == WINDOW


FLOATS: dict[str, tuple[float, float, list[str]]] = {
    "added 0 and -inf": (0.0, -np.inf, ["%w = add %ss, %t : f32[1,4,S,S]"]),
    "added 0 and -1e9": (0.0, -1e9, ["%w = add %ss, %t : f32[1,4,S,S]"]),
    "1 and 0": (1.0, 0.0, ["%n = eq %t, 0.0 : bool[S,S]", "%w = where %n, -inf, %ss : f32[1,4,S,S]"]),
    "1 and 0, lowered": (
        1.0,
        0.0,
        ["%n = sub 1.0, %t : f32[S,S]", "%b = mul %n, -1e9 : f32[S,S]", "%w = add %ss, %b : f32[1,4,S,S]"],
    ),
}


@pytest.mark.parametrize("name", FLOATS)
def test_tables_of_two_numbers(name: str) -> None:
    kept, hidden, lines = FLOATS[name]
    text = graph_text(
        [
            *POSITIONS, *SCORES,
            "%t1 = slice @table: f32[80,80] {axis=0, start=0, stop=S} : f32[S,80]",
            "%t = slice %t1 {axis=1, start=0, stop=S} : f32[S,S]",
            *lines, *FINISH,
        ]
    )  # fmt: skip
    table = np.where(HOLES, kept, hidden).astype(np.float32)
    assert mask(fuse(text, {"table": table})) == "(Table(0, q, k)) & (k <= q)"
    ahead = table.copy()
    ahead[3, 9] = kept
    with pytest.raises(PassError, match="looks ahead: the query at position 3 sees the key at 9"):
        fuse(text, {"table": ahead})
    if kept == 0.0:
        table[5, 2] = -3.0  # neither kept as it is nor hidden
        with pytest.raises(PassError, match="neither a mask nor ALiBi"):
            fuse(text, {"table": table})


def test_tables_need_their_data_and_must_reach_the_context() -> None:
    lines = [*POSITIONS, *READS["sliced"], *SCORES, *HIDE, *FINISH]
    with pytest.raises(PassError, match="reads @table, whose data only a compile from a checkpoint has"):
        fuse(graph_text(lines), {"table": HOLES}, read=False)
    with pytest.raises(PassError, match="table of 80 positions, and the context is 81") as error:
        fuse(graph_text(lines, context=81), {"table": HOLES})
    assert "--max-context 80" in str(error.value)


KEYED_INPUTS = "%q: f32[1,4,S,8], %k: f32[1,4,S,8], %v: f32[1,4,S,8], %b: f32[1,S,4], %g: f32[1,S,2]"
OF_HEAD = [  # of the token's own numbers, and a weight of the head
    "%e = softplus %b : f32[1,S,4]", "%h = mul @a: f32[4], %e : f32[1,S,4]",
    "%ht = transpose %h {perm=[0,2,1]} : f32[1,4,S]", "%x = reshape %ht {shape=[1,4,1,S]} : f32[1,4,1,S]",
]  # fmt: skip
OF_GROUP = [  # one number for every two heads
    "%gt = transpose %g {perm=[0,2,1]} : f32[1,2,S]", "%g1 = sigmoid %gt : f32[1,2,S]",
    "%g2 = reshape %g1 {shape=[1,2,1,1,S]} : f32[1,2,1,1,S]",
    "%g3 = expand %g2 {shape=[1,2,2,1,S]} : f32[1,2,2,1,S]",
    "%x = reshape %g3 {shape=[1,4,1,S]} : f32[1,4,1,S]",
]  # fmt: skip
OF_ALL = [
    "%s1 = slice %b {axis=2, start=0, stop=1} : f32[1,S,1]", "%s2 = sigmoid %s1 : f32[1,S,1]",
    "%s3 = transpose %s2 {perm=[0,2,1]} : f32[1,1,S]", "%x = reshape %s3 {shape=[1,1,1,S]} : f32[1,1,1,S]",
]  # fmt: skip


@pytest.mark.parametrize("lines", [OF_HEAD, OF_GROUP, OF_ALL], ids=["head", "group", "all"])
def test_a_bias_of_the_keys_token_is_one_more_element_of_the_key(lines: list[str]) -> None:
    weights = {"a": np.array([0.5, -1.0, 2.0, 0.25])}
    added = ["%x2 = mul %x, 0.5 : " + lines[-1].split(" : ")[1], "%b1 = add %ss, %x2 : f32[1,4,S,S]"]
    hide = ["%w = where %m, %b1, -inf : f32[1,4,S,S]"]
    text = graph_text([*POSITIONS, *CAUSAL, *SCORES, *lines, *added, *hide, *FINISH], KEYED_INPUTS)
    found = attention(fuse(text, weights))
    assert [sizes_of(a) for a in found.args[:3]] == ["[1,4,S,9]", "[1,4,S,9]", "[1,4,S,8]"]
    given = ["%y = expand %x {shape=[1,4,S,S]} : f32[1,4,S,S]", "%y2 = where %m, %y, -3e38 : f32[1,4,S,S]",
             f"%z = attention %q, %k, %v, %y2 {{scale=0.3}} : f32[1,S,4,8] // {LOC}"]  # fmt: skip
    found = attention(fuse(graph_text([*POSITIONS, *CAUSAL, *lines, *given], KEYED_INPUTS), weights))
    assert [sizes_of(a) for a in found.args[:3]] == ["[1,4,S,9]", "[1,4,S,9]", "[1,4,S,8]"]
    assert expression(found.attr("mask")) == "k <= q"


def test_a_bias_of_shared_keys_is_theirs_and_one_of_every_head_repeats_them() -> None:
    inputs = KEYED_INPUTS.replace("%k: f32[1,4,S,8], %v: f32[1,4,S,8]", "%k: f32[1,2,S,8], %v: f32[1,2,S,8]")
    for lines, heads in ((OF_GROUP, 2), (OF_HEAD, 4)):
        given = ["%y = expand %x {shape=[1,4,S,S]} : f32[1,4,S,S]", "%y2 = where %m, %y, -inf : f32[1,4,S,S]",
                 f"%z = attention %q, %k, %v, %y2 {{scale=0.3}} : f32[1,S,4,8] // {LOC}"]  # fmt: skip
        weights = {"a": np.array([0.5, -1.0, 2.0, 0.25])}
        found = attention(fuse(graph_text([*POSITIONS, *CAUSAL, *lines, *given], inputs), weights))
        assert [sizes_of(a) for a in found.args[1:3]] == [f"[1,{heads},S,9]", f"[1,{heads},S,8]"]


@pytest.mark.parametrize(
    "lines, attrs, reason",
    [
        (["%y0 = mul %x, 1.0 : f32[1,4,1,S]"], ", softcap=4.0", "after they are capped"),
        (["%c1 = gt %x, 0.0 : bool[1,4,1,S]", "%y0 = where %c1, %x, -1.0 : f32[1,4,1,S]"], "", "condition"),
        (["%y0 = minimum %x, -30000.0 : f32[1,4,1,S]"], "", "-30000.0 is added"),
        (
            ["%f = cast %ik {dtype=\"f32\"} : f32[1,S]", "%xe = expand %x {shape=[1,4,S,S]} : f32[1,4,S,S]",
             "%y0 = mul %xe, %f : f32[1,4,S,S]"],
            "", "neither a mask nor a bias",
        ),
    ],
)  # fmt: skip
def test_a_bias_of_tokens_that_is_no_sum_of_finite_numbers_is_refused(
    lines: list[str], attrs: str, reason: str
) -> None:
    call = ["%y1 = expand %y0 {shape=[1,4,S,S]} : f32[1,4,S,S]", "%y2 = where %m, %y1, -inf : f32[1,4,S,S]",
            f"%z = attention %q, %k, %v, %y2 {{scale=0.3{attrs}}} : f32[1,S,4,8] // {LOC}"]  # fmt: skip
    with pytest.raises(PassError, match=reason):
        fuse(graph_text([*POSITIONS, *CAUSAL, *OF_HEAD, *lines, *call], KEYED_INPUTS), {"a": np.ones(4)})


REFUSED: dict[str, tuple[list[str], str, str]] = {  # lines, reason, the op it is at
    "no mask": (["%w = mul %ss, 1.0 : f32[1,4,S,S]"], "looks ahead", "softmax"),
    "one ahead": (["%m = ge %d, -1 : bool[S,S]", *HIDE], "position 0 sees the key at 1", "softmax"),
    "one key, far ahead": (
        ["%c = le %ik, %iq : bool[S,S]", "%e = eq %ik, 77 : bool[1,S]", "%m = or %c, %e : bool[S,S]", *HIDE],
        "position 0 sees the key at 77",
        "softmax",
    ),
    "backwards": (["%m = ge %ik, %iq : bool[S,S]", *HIDE], "looks ahead", "softmax"),
    "lowered too little": (
        [*CAUSAL, ZERO, "%b = where %m, %zero, -10.0 : f32[S,S]", "%w = add %ss, %b : f32[1,4,S,S]"],
        "neither a mask nor ALiBi",
        "softmax",
    ),
    "set to zero": (
        [*CAUSAL, '%f = cast %m {dtype="f32"} : f32[S,S]', "%w = mul %ss, %f : f32[1,4,S,S]"],
        "neither a mask nor ALiBi",
        "softmax",
    ),
    "not even itself": (["%m = gt %d, 0 : bool[S,S]", *HIDE], "the query at position 0 no key", "softmax"),
    "from scores": (["%m = gt %ss, 0.0 : bool[1,4,S,S]", *HIDE], "computed from the tokens", "gt"),
    "by length": (
        ["%n = dim {size=S} : i32[]", "%h = floordiv %n, 2 : i32[]", "%m = lt %d, %h : bool[S,S]", *HIDE],
        "floordiv|depends on S",
        "",
    ),
    "by head": (
        [
            "%hd = iota {size=4} : i32[4]", "%h = reshape %hd {shape=[4,1,1]} : i32[4,1,1]",
            "%c = le %ik, %iq : bool[S,S]", "%x = le %d, %h : bool[4,S,S]", "%m = and %c, %x : bool[4,S,S]",
            *HIDE,
        ],
        "differs from head to head",
        "softmax",
    ),
    "a learned bias between positions": (
        [
            *CAUSAL, "%sum = add %iq, %ik : i32[S,S]", "%cl = clamp %sum {low=0, high=31} : i32[S,S]",
            "%t = take @bias: f32[32], %cl {axis=0} : f32[S,S]", "%x = add %ss, %t : f32[1,4,S,S]",
            "%w = where %m, %x, -inf : f32[1,4,S,S]",
        ],
        "@bias, an array of many different numbers",
        "take",
    ),
    "a bias that is not linear": (
        [
            *CAUSAL, "%dd = mul %d, %ik : i32[S,S]", '%f = cast %dd {dtype="f32"} : f32[S,S]',
            "%x = sub %ss, %f : f32[1,4,S,S]", "%w = where %m, %x, -inf : f32[1,4,S,S]",
        ],
        "neither a mask nor ALiBi",
        "softmax",
    ),
    "fractions": (
        [
            '%f = cast %d {dtype="f32"} : f32[S,S]', "%x = mul %f, 0.1 : f32[S,S]",
            "%m = ge %x, 0.0 : bool[S,S]", *HIDE,
        ],
        "a fraction of positions",
        "ge",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_at_the_op(name: str) -> None:
    lines, reason, kind = REFUSED[name]
    bias = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    with pytest.raises(PassError, match=reason) as error:
        fuse(graph_text([*POSITIONS, *SCORES, *lines, *FINISH]), {"bias": bias})
    assert error.value.op is not None and (not kind or error.value.op.kind == kind)
    if kind == "softmax":
        assert f"at {LOC}" in str(error.value)


NEAR: dict[str, tuple[list[str], str]] = {
    "masked after the softmax": (
        [
            "%p1 = softmax %ss {axis=3} : f32[1,4,S,S]", '%f = cast %m {dtype="f32"} : f32[S,S]',
            "%p = mul %p1, %f : f32[1,4,S,S]", "%z = matmul %p, %v : f32[1,4,S,8]",
        ],
        "the probabilities are changed after the softmax",
    ),
    "softmax over the queries": (
        [*HIDE, "%p = softmax %w {axis=2} : f32[1,4,S,S]", "%z = matmul %p, %v : f32[1,4,S,8]"],
        "the softmax is not over the keys",
    ),
    "probabilities transposed": (
        [
            *HIDE, "%p1 = softmax %w {axis=3} : f32[1,4,S,S]",
            "%p = transpose %p1 {perm=[0,1,3,2]} : f32[1,4,S,S]",
            "%z = matmul %p, %v : f32[1,4,S,8]",
        ],
        "the softmax is not over the keys",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEAR)
def test_near_misses_say_why(name: str) -> None:
    lines, reason = NEAR[name]
    graph = parse(graph_text([*POSITIONS, *CAUSAL, *SCORES, *lines]))
    found = FuseAttention().run(graph)
    assert found.count == 0 and found.graph == graph
    assert any(reason in str(miss) for miss in found.misses), [str(m) for m in found.misses]


def test_attention_ops_get_proved_predicates() -> None:
    def text(args: str, attrs: str) -> str:
        call = f"%z = attention %q, %k, %v{args} {{scale=0.25{attrs}}} : f32[1,S,4,8] // {LOC}"
        return graph_text([*POSITIONS, *MASKS["window"][0], ZERO,
                           "%b = where %m, %zero, -inf : f32[S,S]", call])  # fmt: skip

    assert mask(fuse(text(", %m", ""))) == WINDOW
    assert mask(fuse(text(", %b", ", softcap=5.0"))) == WINDOW
    assert mask(fuse(text("", ", mask=((q - k) < 8) & (k <= q)"))) == WINDOW
    assert mask(fuse(text("", ", mask=((q - k) < 800) & (k <= q)"))) == "k <= q"
    for attrs in ("", ", mask=(q - k) < 8", ", mask=true"):
        with pytest.raises(PassError, match=f"every query sees later keys at {LOC}|looks ahead.* at {LOC}"):
            fuse(text("", attrs))


def test_nothing_may_be_added_beside_sinks() -> None:
    """A softmax takes out what is added to all its scores, but the sink is not among them."""
    call = "%z = attention %q, %k, %v, %b, @sinks: f32[4] {scale=0.25} : f32[1,S,4,8]"
    shift = ['%one = full {shape=[], value=1.0, dtype="f32"} : f32[]', "%b = where %m, %one, -inf : f32[S,S]"]
    with pytest.raises(PassError, match="sinks"):
        fuse(graph_text([*POSITIONS, *CAUSAL, *shift, call]), {"sinks": np.ones(4, np.float32)})


def test_equal_masks_are_proved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    prove = prover.prove

    def counted(*args: Any) -> Any:
        calls.append(args)
        return prove(*args)

    monkeypatch.setattr(prover, "prove", counted)
    lines = [*POSITIONS, "%x = attention %q, %k, %v, %m {scale=0.25} : f32[1,S,4,8]",
             "%y = transpose %x {perm=[0,2,1,3]} : f32[1,4,S,8]",
             "%m2 = not %n : bool[S,S]",
             "%z = attention %y, %k, %v, %m2 {scale=0.25} : f32[1,S,4,8]"]  # fmt: skip
    lines[4:4] = [*CAUSAL, "%n = gt %ik, %iq : bool[S,S]"]
    step = FuseAttention()
    graph = step.run(parse(graph_text(lines))).graph
    assert [expression(op.attr("mask")) for op in graph.ops if op.kind == "attention"] == ["k <= q"] * 2
    assert len(calls) == 1


class Emitter:
    """A predicate as ops on iotas: what a model that computes it would import as."""

    KINDS = {sympy.Add: "add", sympy.Mul: "mul", FloorDiv: "floordiv", sympy.Mod: "mod", sympy.And: "and",
             sympy.Or: "or", sympy.Le: "le", sympy.Lt: "lt", sympy.Ge: "ge", sympy.Gt: "gt", sympy.Eq: "eq",
             sympy.Ne: "ne"}  # fmt: skip

    def __init__(self, build: GraphBuilder) -> None:
        self.build, size = build, symbol("S")
        at = build.op("iota", size=size, dtype="i32")
        self.places = {
            QUERY: build.op("reshape", at, shape=(size, 1)),
            KEY: build.op("reshape", at, shape=(1, size)),
        }

    def op(self, e: Any) -> Value:
        if e in self.places:
            return self.places[e]
        if e in (sympy.true, sympy.false):
            return self.build.op("full", shape=(1, 1), value=bool(e), dtype="bool")
        if isinstance(e, sympy.Integer):
            return self.build.op("full", shape=(1, 1), value=int(e), dtype="i32")
        if isinstance(e, sympy.Not):
            return self.build.op("not", self.op(e.args[0]))
        if isinstance(e, sympy.Pow):
            return self.build.op("pow", self.op(e.args[0]), Scalar(int(e.exp)))  # type: ignore[arg-type]
        kind = next(name for cls, name in self.KINDS.items() if isinstance(e, cls))
        first, *rest = [self.scalar(a, kind) for a in e.args]
        for other in rest:
            first = self.build.op(kind, first, other)
        assert isinstance(first, Value)
        return first

    def scalar(self, e: Any, kind: str) -> Any:
        is_divisor = kind in ("floordiv", "mod") and isinstance(e, sympy.Integer)
        return Scalar(int(e)) if is_divisor and e > 0 else self.op(e)


def graph_of(predicate: Any, context: int) -> Graph:
    size = symbol("S")
    heads = Tensor(DType.F32, (1, 2, size, 4))
    build = GraphBuilder("g", {"S": (1, context)}, [Value("pos", Tensor(DType.I32, (1, size)))])
    q, k, v = (build.input(name, heads) for name in "qkv")
    seen = build.op("expand", Emitter(build).op(predicate), shape=(size, size))
    return build.graph([build.op("attention", q, k, v, seen, scale=0.5)])


@settings(max_examples=100, deadline=None)
@given(predicates)
def test_random_masks_run_right_or_are_refused(predicate: Any) -> None:
    context = 24
    for each in (predicate, sympy.And(KEY <= QUERY, sympy.Or(predicate, sympy.Eq(KEY, QUERY)))):
        seen = grid(each, context)
        sound = not np.triu(seen, 1).any() and bool(seen.any(axis=1).all())
        before = graph_of(each, context)
        try:
            after = FuseAttention().run(before).graph
        except PassError:
            assert not sound
            continue
        assert sound
        assert all(op.args[3:4] in ((), (None,)) for op in after.ops if op.kind == "attention")
        assert_same_numbers(before, after, {}, (1, 15, 17, context))
