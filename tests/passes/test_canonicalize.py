"""canonicalize: each rule on the form that it is for, and on one that only looks like it."""

from __future__ import annotations

from functools import partial

import pytest

from ir.dims import symbol
from ir.graph import tensor_of
from ir.text.printer import print_graph
from passes.canonicalize import Canonicalize
from tests.passes.checks import apply, expect, graph_text, read, refuse

HEAD = "graph @g(%x: f32[1,S,8], %y: f32[1,S,8]) dims {S: 1..64} {"
body = partial(graph_text, HEAD)


def test_no_ops_go_and_the_output_keeps_its_name() -> None:
    expect(
        Canonicalize(),
        body(
            '%a = cast %x {dtype="f32"} : f32[1,S,8]',
            "%b = reshape %a {shape=[1,S,8]} : f32[1,S,8]",
            "%c = transpose %b {perm=[0,1,2]} : f32[1,S,8]",
            "%d = slice %c {axis=2, start=0, stop=8} : f32[1,S,8]",
            "%e = add 0.0, %d : f32[1,S,8]",
            "%f = mul %e, 1.0 : f32[1,S,8]",
            "%n = neg %f : f32[1,S,8]",
            "%z = div %n, 1.0 : f32[1,S,8]",
        ),
        body("%z = neg %x : f32[1,S,8]"),
    )


def test_a_slice_with_a_step_and_a_real_transpose_stay() -> None:
    text = body(
        "%a = transpose %x {perm=[0,2,1]} : f32[1,8,S]",
        "%z = slice %a {axis=1, start=0, stop=8, step=2} : f32[1,4,S]",
    )
    assert print_graph(apply(Canonicalize(), text).graph) == print_graph(read(text))


def test_moves_in_a_row_are_one() -> None:
    expect(
        Canonicalize(),
        body(
            "%a = reshape %x {shape=[S,8]} : f32[S,8]",
            "%b = reshape %a {shape=[S,2,4]} : f32[S,2,4]",
            "%c = transpose %b {perm=[1,0,2]} : f32[2,S,4]",
            "%z = transpose %c {perm=[2,0,1]} : f32[4,2,S]",
        ),
        body(
            "%b = reshape %x {shape=[S,2,4]} : f32[S,2,4]",
            "%z = transpose %b {perm=[2,1,0]} : f32[4,2,S]",
        ),
    )


def test_concat_drops_empty_parts() -> None:
    expect(
        Canonicalize(),
        body(
            "%a = slice %x {axis=2, start=8, stop=8} : f32[1,S,0]",
            "%n = neg %x : f32[1,S,8]",
            "%z = concat %n, %a {axis=2} : f32[1,S,8]",
        ),
        body("%z = neg %x : f32[1,S,8]"),
    )


def test_a_cast_back_from_a_wider_type_goes_and_from_a_narrower_one_stays() -> None:
    found = apply(
        Canonicalize(),
        """graph @g(%x: bf16[4], %y: f32[4]) dims {} {
        %a = cast %x {dtype="f32"} : f32[4]
        %b = cast %a {dtype="bf16"} : bf16[4]
        %u = neg %b : bf16[4]
        %c = cast %y {dtype="bf16"} : bf16[4]
        %v = cast %c {dtype="f32"} : f32[4]
        return %u, %v
        }""".replace(" dims {}", ""),
    )
    assert [op.kind for op in found.graph.ops] == ["neg", "cast", "cast"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%z = add 2.5, %x", "%z = add %x, 2.5"),
        ("%z = sub %x, 2.5", "%z = add %x, -2.5"),
        ("%z = sub 2.5, %x", "%z = sub 2.5, %x"),
        ("%z = div %x, 8.0", "%z = mul %x, 0.125"),
        ("%z = div %x, 3.0", "%z = div %x, 3.0"),
        ("%z = pow %x, 2", "%z = mul %x, %x"),
        ("%z = pow %x, 3.0", "%z = pow %x, 3.0"),
        ("%z = maximum 0.0, %x", "%z = relu %x"),
        ("%z = clamp %x {low=0.0}", "%z = relu %x"),
        ("%z = clamp %x {low=0.0, high=1.0}", "%z = clamp %x {low=0.0, high=1.0}"),
    ],
)
def test_arithmetic_with_literals(line: str, expected: str) -> None:
    expect(Canonicalize(), body(f"{line} : f32[1,S,8]"), body(f"{expected} : f32[1,S,8]"))


def test_roots_and_negations_by_name() -> None:
    expect(
        Canonicalize(),
        body(
            "%a = mul %x, %x : f32[1,S,8]",
            "%b = pow %a, 0.5 : f32[1,S,8]",
            "%c = div 1.0, %b : f32[1,S,8]",
            "%n = neg %y : f32[1,S,8]",
            "%z = add %c, %n : f32[1,S,8]",
        ),
        body(
            "%a = mul %x, %x : f32[1,S,8]",
            "%c = rsqrt %a : f32[1,S,8]",
            "%z = sub %c, %y : f32[1,S,8]",
        ),
    )


def test_constants_become_literals_where_the_shape_stays() -> None:
    expect(
        Canonicalize(),
        body(
            '%c = full {shape=[], value=3.0, dtype="f32"} : f32[]',
            '%d = dim {size=8, dtype="f32"} : f32[]',
            "%a = mul %c, %x : f32[1,S,8]",
            "%z = div %a, %d : f32[1,S,8]",
        ),
        body("%a = mul %x, 3.0 : f32[1,S,8]", "%z = mul %a, 0.125 : f32[1,S,8]"),
    )
    widening = body(
        '%c = full {shape=[3,1,8], value=3.0, dtype="f32"} : f32[3,1,8]', "%z = mul %x, %c : f32[3,S,8]"
    )
    assert print_graph(apply(Canonicalize(), widening).graph) == print_graph(read(widening))


def test_the_sequence_length_stays_a_value() -> None:
    text = body('%n = dim {size=S, dtype="f32"} : f32[]', "%z = div %x, %n : f32[1,S,8]")
    assert print_graph(apply(Canonicalize(), text).graph) == print_graph(read(text))


def test_an_expand_before_a_broadcasting_op_goes_unless_it_gives_the_shape() -> None:
    expect(
        Canonicalize(),
        body(
            "%m = mean %y {axes=[2], keepdims=true} : f32[1,S,1]",
            "%e = expand %m {shape=[1,S,8]} : f32[1,S,8]",
            "%z = sub %x, %e : f32[1,S,8]",
        ),
        body("%m = mean %y {axes=[2], keepdims=true} : f32[1,S,1]", "%z = sub %x, %m : f32[1,S,8]"),
    )
    text = body("%e = expand %x {shape=[2,S,8]} : f32[2,S,8]", "%z = mul %e, %x : f32[2,S,8]")
    assert print_graph(apply(Canonicalize(), text).graph) == print_graph(read(text))


def test_silu_and_sigmoid_in_arithmetic() -> None:
    for lines in (
        ["%a = sigmoid %x : f32[1,S,8]", "%z = mul %a, %x : f32[1,S,8]"],
        [
            "%n = neg %x : f32[1,S,8]",
            "%e = exp %n : f32[1,S,8]",
            "%d = add 1.0, %e : f32[1,S,8]",
            "%z = div %x, %d : f32[1,S,8]",
        ],
        [
            "%n = neg %x : f32[1,S,8]",
            "%e = exp %n : f32[1,S,8]",
            "%d = add %e, 1.0 : f32[1,S,8]",
            "%s = div 1.0, %d : f32[1,S,8]",
            "%z = mul %x, %s : f32[1,S,8]",
        ],
    ):
        expect(Canonicalize(), body(*lines), body("%z = silu %x : f32[1,S,8]"))
    text = body("%a = sigmoid %x : f32[1,S,8]", "%z = mul %a, %y : f32[1,S,8]")
    assert print_graph(apply(Canonicalize(), text).graph) == print_graph(read(text))


GELU = [
    "%d = div %x, 1.4142135623730951 : f32[1,S,8]",
    "%e = erf %d : f32[1,S,8]",
    "%f = add %e, 1.0 : f32[1,S,8]",
]
GELU_TANH = [
    "%c = pow %x, 3.0 : f32[1,S,8]",
    "%k = mul %c, 0.044715 : f32[1,S,8]",
    "%a = add %x, %k : f32[1,S,8]",
    "%b = mul %a, 0.7978845608028654 : f32[1,S,8]",
    "%t = tanh %b : f32[1,S,8]",
    "%f = add %t, 1.0 : f32[1,S,8]",
]
FAST_GELU = [
    "%c = mul %x, 0.7978845608 : f32[1,S,8]",
    "%k = mul %x, 0.044715 : f32[1,S,8]",
    "%s = mul %k, %x : f32[1,S,8]",
    "%o = add 1.0, %s : f32[1,S,8]",
    "%b = mul %c, %o : f32[1,S,8]",
    "%t = tanh %b : f32[1,S,8]",
    "%f = add %t, 1.0 : f32[1,S,8]",
]
HALVES = [
    ["%h = mul %x, 0.5 : f32[1,S,8]", "%z = mul %h, %f : f32[1,S,8]"],
    ["%h = mul %f, %x : f32[1,S,8]", "%z = mul 0.5, %h : f32[1,S,8]"],
    ["%h = mul %f, 0.5 : f32[1,S,8]", "%z = mul %x, %h : f32[1,S,8]"],
    ["%h = div %x, 2.0 : f32[1,S,8]", "%z = mul %f, %h : f32[1,S,8]"],
]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    ("lines", "kind"), [(GELU, "gelu"), (GELU_TANH, "gelu_tanh"), (FAST_GELU, "gelu_tanh")]
)
def test_gelu_in_arithmetic(lines: list[str], kind: str, half: list[str]) -> None:
    expect(Canonicalize(), body(*lines, *half), body(f"%z = {kind} %x : f32[1,S,8]"), rtol=1e-8)


def test_gelu_with_another_constant_or_another_factor_is_not_gelu() -> None:
    wrong = [line.replace("0.044715", "0.05") for line in GELU_TANH]
    refuse(Canonicalize(), body(*wrong, *HALVES[0]), "not taken of what gelu takes it of")
    other = [line.replace("%x", "%y") for line in HALVES[0]]
    refuse(Canonicalize(), body(*GELU_TANH, *other), "x / 2 of the same x")


def test_addmm_on_rows_becomes_a_linear_with_bias() -> None:
    expect(
        Canonicalize(),
        body(
            "%r = reshape %x {shape=[S,8]} : f32[S,8]",
            "%m = matmul %r, @w: f32[8,6] : f32[S,6]",
            "%a = add @b: f32[6], %m : f32[S,6]",
            "%z = reshape %a {shape=[1,S,6]} : f32[1,S,6]",
        ),
        body(
            "%w = transpose @w: f32[8,6] {perm=[1,0]} : f32[6,8]",
            "%z = linear %x, %w, @b: f32[6] : f32[1,S,6]",
        )
        .replace("%w =", "%v1 =")
        .replace("%w,", "%v1,"),
    )


def test_a_batched_product_with_one_matrix_is_a_linear() -> None:
    expect(
        Canonicalize(),
        body("%z = matmul %x, @w: f32[1,8,6] : f32[1,S,6]"),
        body(
            "%v1 = reshape @w: f32[1,8,6] {shape=[8,6]} : f32[8,6]",
            "%v2 = transpose %v1 {perm=[1,0]} : f32[6,8]",
            "%z = linear %x, %v2 : f32[1,S,6]",
        ),
    )


def test_a_product_with_several_matrices_stays() -> None:
    text = body("%z = matmul %x, @w: f32[3,8,6] : f32[3,S,6]")
    assert print_graph(apply(Canonicalize(), text).graph) == print_graph(read(text))


def test_a_linear_used_twice_keeps_its_bias_outside() -> None:
    refuse(
        Canonicalize(),
        body(
            "%m = linear %x, @w: f32[8,8] : f32[1,S,8]",
            "%a = add %m, @b: f32[8] : f32[1,S,8]",
            "%z = mul %m, %a : f32[1,S,8]",
        ),
        "used elsewhere too",
    )


def test_splitting_one_head_off_is_not_unflattening() -> None:
    text = """graph @g(%x: f32[T,8]) dims {T: 1..64} {
    %m = linear %x, @w: f32[4,8] : f32[T,4]
    %z = reshape %m {shape=[T,1,4]} : f32[T,1,4]
    return %z
    }"""
    assert print_graph(apply(Canonicalize(), text).graph) == print_graph(read(text))


def kinds(text: str) -> list[tuple[str, str]]:
    """What is left of a text, each op with its result's sizes; its numbers are seen to be the same."""
    ops = apply(Canonicalize(), text).graph.ops
    return [(op.kind, ",".join(map(str, tensor_of(op.out).shape))) for op in ops]


def test_a_softmax_over_another_axis_is_turned() -> None:
    states = "%a = reshape %x {shape=[1,S,2,4]} : f32[1,S,2,4]"
    assert kinds(body(states, "%z = softmax %a {axis=2} : f32[1,S,2,4]")) == [
        ("reshape", "1,S,2,4"),
        ("transpose", "1,S,4,2"),
        ("softmax", "1,S,4,2"),
        ("transpose", "1,S,2,4"),
    ]
    text = body("%z = softmax %x {axis=1} : f32[1,S,8]")
    assert print_graph(apply(Canonicalize(), text).graph) == print_graph(read(text))


def test_rows_of_heads_are_heads_of_rows() -> None:
    product = [
        "%b = slice %y {axis=2, start=0, stop=4} : f32[1,S,4]",
        "%t = transpose %b {perm=[0,2,1]} : f32[1,4,S]",
        "%m = reshape %h {shape=[1,2*S,4]} : f32[1,2*S,4]",
        "%z = matmul %m, %t : f32[1,2*S,S]",
    ]
    rows = "%a = reshape %x {shape=[S,2,4]} : f32[S,2,4]"
    heads = "%h = transpose %a {perm=[1,0,2]} : f32[2,S,4]"
    assert ("matmul", "1,2,S,S") in kinds(body(rows, heads, *product))
    product[2] = product[2].replace("%h", "%a")  # a token's heads in a row are no heads of rows
    assert ("matmul", "1,2*S,S") in kinds(body(rows, *product))


def test_what_is_done_for_rows_of_tokens_and_heads_keeps_the_token_axis() -> None:
    """A norm over each head, times a gate in the same rows, as reshape(-1, head_size) makes them."""
    text = graph_text(
        "graph @g(%x: f32[1,S,2,4], %y: f32[1,S,8]) dims {S: 1..64} {",
        "%a = reshape %x {shape=[2*S,4]} : f32[2*S,4]",
        "%g = reshape %y {shape=[2*S,4]} : f32[2*S,4]",
        "%n = rms_norm %a, @w: f32[4] {eps=1e-06} : f32[2*S,4]",
        "%s = sigmoid %g : f32[2*S,4]",
        "%t = mul %n, %s : f32[2*S,4]",
        "%l = linear %t, @m: f32[4,4] : f32[2*S,4]",
        "%u = mean %l {axes=[1], keepdims=true} : f32[2*S,1]",
        "%v = sub %l, %u : f32[2*S,4]",
        "%z = reshape %v {shape=[1,S,8]} : f32[1,S,8]",
    )
    found = apply(Canonicalize(), text).graph
    assert all(isinstance(d, int) or d == symbol("S") for op in found.ops for d in tensor_of(op.out).shape)
    assert {op.kind for op in found.ops} == {
        "reshape", "rms_norm", "sigmoid", "mul", "linear", "mean", "sub"
    }  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "%v = mean %a {axes=[0], keepdims=true} : f32[1,4]",
        "%v = layer_norm %a {eps=1e-06, rank=2} : f32[2*S,4]",
        "%v = softmax %a {axis=0} : f32[2*S,4]",
    ],
)
def test_what_mixes_the_rows_of_tokens_stays(line: str) -> None:
    text = graph_text(
        "graph @g(%x: f32[1,S,2,4]) dims {S: 1..64} {",
        "%a = reshape %x {shape=[2*S,4]} : f32[2*S,4]",
        line,
        "%z = neg %v : " + line.rsplit(" ", 1)[1],
    )
    assert "f32[2*S,4]" in print_graph(apply(Canonicalize(), text).graph)
