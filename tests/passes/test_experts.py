"""Experts' linears pass by pass: merged, given an epilogue, quantised, narrowed, and folded into kernels."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ir.graph import Graph, Op
from ir.interpret import interpret
from passes.convert_weights import ConvertWeights
from passes.cse import Cse
from passes.dce import Dce
from passes.fuse_casts import FuseCasts
from passes.fuse_dequant import FuseDequant
from passes.fuse_epilogue import FuseEpilogue
from passes.match import dtype
from passes.merge_linears import MergeLinears
from passes.narrow_activations import NarrowActivations
from passes.quantize_activations import QuantizeActivations
from passes.quantize_weights import QuantizeWeights
from passes.routers import routers
from tests.passes.checks import apply, expect, graph_text, random_inputs, random_weights, read, refuse

HEAD = "graph @g(%x: f32[T,64], %e: i32[T,3], %y: f32[T,3,64]) dims {T: 1..64} {"
body = partial(graph_text, HEAD)
STACK = "%a = moe_linear %x, @w: f32[40,64], %e, @b: f32[4,10] {num_experts=4} : f32[T,3,10] // l0.experts"
HALVES = "%g, %u = split %a {axis=2, sizes=[5,5]} : f32[T,3,5], f32[T,3,5] // l0.experts"
PRODUCT = ["%s = silu %g : f32[T,3,5] // l0.experts", "%z = mul %s, %u : f32[T,3,5] // l0.experts"]
CODES = "%w = dequantize @q: {}[40,64], @qs: f16[40,2]{} {{group_size=32{}}} : f32[40,64]"


def only(graph: Graph, kind: str) -> Op:
    (op,) = (op for op in graph.ops if op.kind == kind)
    return op


def test_gate_times_up_is_their_epilogue() -> None:
    attrs = '{num_experts=4, activation="silu", gated=true}'
    after = STACK.replace("%a =", "%z =").replace("{num_experts=4}", attrs).replace("3,10] //", "3,5] //")
    expect(FuseEpilogue(), body(STACK, HALVES, *PRODUCT), body(after))


def test_up_before_gate_is_exchanged_in_each_expert() -> None:
    lines = [STACK, HALVES.replace("%g, %u", "%u, %g"), *PRODUCT]
    op = only(apply(FuseEpilogue(), body(*lines)).graph, "moe_linear")
    assert op.attr("gated") and op.attr("activation") == "silu" and len(op.args) == 4
    apply(FuseEpilogue(), body(STACK.replace(", @b: f32[4,10]", ""), *lines[1:]))  # without a bias


def test_an_activation_alone_is_their_epilogue() -> None:
    found = apply(FuseEpilogue(), body(STACK, "%z = relu %a : f32[T,3,10]"))
    assert only(found.graph, "moe_linear").attr("activation") == "relu" and found.count == 1


def test_alternate_outputs_are_no_halves() -> None:
    odd = "%{} = slice %a {{axis=2, start={}, stop=10, step=2}} : f32[T,3,5]"
    refuse(FuseEpilogue(), body(STACK, odd.format("g", 0), odd.format("u", 1), *PRODUCT), "not halves")


TWO = [
    "%u = moe_linear %x, @wu: f32[20,64], %e {num_experts=4} : f32[T,3,5] // l0.experts.up",
    "%g = moe_linear %x, @wg: f32[20,64], %e, @bg: f32[4,5] {num_experts=4} : f32[T,3,5] // l0.experts.gate",
    *PRODUCT,
]


def test_gate_and_up_of_two_stacks_are_merged_expert_by_expert() -> None:
    found = apply(MergeLinears(), body(*TWO))
    op = only(found.graph, "moe_linear")
    assert found.count == 1 and op.out.name == "g_u" and op.out.type.shape[-1] == 10  # type: ignore[union-attr]
    assert apply(FuseEpilogue(), found.graph).graph.ops[-1].attr("gated")


def test_stacks_of_other_slots_are_not_merged() -> None:
    other = "%f = minimum %e, 2 : i32[T,3]"
    assert apply(MergeLinears(), body(other, TWO[0].replace("%e", "%f"), *TWO[1:])).count == 0


ROUTER = [
    "%r = linear %x, @router: f32[8,64] : f32[T,8] // l0.gate",
    "%p = softmax %r {axis=1} : f32[T,8] // l0",
    "%top, %chosen = topk %p {k=3} : f32[T,3], i32[T,3] // l0",
    "%h = moe_linear %x, @l0.experts.up: f32[40,64], %chosen {num_experts=8} : f32[T,3,5] // l0.experts",
    "%m = reshape %top {shape=[T,3,1]} : f32[T,3,1]",
    "%z = mul %h, %m : f32[T,3,5] // l0",
]


def formats(step: QuantizeWeights, *lines: str) -> dict[str, str]:
    """dtype of each weight that is quantised."""
    ops = step.run(read(body(*(lines or ROUTER)))).graph.ops
    rounded = [op for op in ops if op.kind == "quantize_weight"]
    return {op.args[0].name: str(op.attr("dtype")) for op in rounded}  # type: ignore[union-attr]


def test_what_chooses_among_experts_stays_unless_a_rule_names_it() -> None:
    assert routers(read(body(*ROUTER))) == {"r"}
    assert formats(QuantizeWeights("u4")) == {"l0.experts.up": "u4"}
    assert formats(QuantizeWeights("u4", overrides=("l0.gate=i8",))) == {
        "router": "i8",
        "l0.experts.up": "u4",
    }
    (miss,) = QuantizeWeights("u4").run(read(body(*ROUTER))).misses
    assert "chooses among experts" in str(miss) and "l0.gate" in str(miss)


def test_a_router_is_not_merged_with_what_else_reads_its_input() -> None:
    shared = [
        "%s = linear %x, @shared: f32[1,64] : f32[T,1] // l0.shared",
        "%o = reshape %s {shape=[T,1,1]} : f32[T,1,1]",
    ]
    lines = [*shared, *ROUTER[:-1], "%v = mul %m, %o : f32[T,3,1]", ROUTER[-1].replace("%m", "%v")]
    assert apply(MergeLinears(), body(*lines)).count == 0


@pytest.mark.parametrize("pattern", ["l0.experts.up", "l0.experts", "*.up"])
def test_a_stack_is_named_by_its_own_name_and_by_its_module(pattern: str) -> None:
    assert formats(QuantizeWeights("u4", keep=(pattern,))) == {}


@pytest.mark.parametrize(("dtype", "bound"), [("u4", 0.2), ("i8", 0.01), ("f8e4m3", 0.06)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_results_of_codes_are_near(dtype: str, bound: float, symmetric: bool) -> None:
    graph = read(body(STACK.replace("%a =", "%z =")))
    inputs, weights = random_inputs(graph), random_weights(graph)
    step = QuantizeWeights(dtype, symmetric=symmetric)
    want, got = (interpret(g, inputs, weights, np.float64).outputs[0] for g in (graph, step.run(graph).graph))
    assert bound / 10 < np.std(got - want) / np.std(want) < bound


@pytest.mark.parametrize(
    ("dtype", "more", "attrs"),
    [
        ("u4", "", ", zero=8"),
        ("i8", "", ""),
        ("u4", ", _, @qm: f16[40,2]", ""),
        ("u8", ", @qz: u8[40,2]", ""),
    ],
)
@pytest.mark.parametrize("x", ["%x", "%y"])
def test_codes_are_folded_with_bias_and_experts(dtype: str, more: str, attrs: str, x: str) -> None:
    linear = STACK.replace("%a =", "%z =").replace("@w: f32[40,64]", "%w").replace("%x", x)
    found = apply(FuseDequant(), body(CODES.format(dtype, more, attrs), linear), 1e-6)
    (op,) = found.graph.ops
    assert op.kind == "qmoe_linear" and op.attr("num_experts") == 4 and op.args[3].name == "e"  # type: ignore
    assert op.args[6].name == "b"  # type: ignore[union-attr]


def test_codes_are_seen_through_stacks_that_were_merged() -> None:
    codes = [CODES.format("u4", "", ", zero=8").replace("40", "20").replace("@q", f"@{n}q") for n in "ug"]
    lines = [c.replace("%w", f"%w{n}") for c, n in zip(codes, "ug", strict=True)]
    stacks = [line.replace(f"@w{n}: f32[20,64]", f"%w{n}") for line, n in zip(TWO, "ug", strict=False)]
    merged = apply(MergeLinears(), body(*lines, *stacks, *PRODUCT))
    assert merged.count == 1
    found = apply(FuseDequant(), apply(FuseEpilogue(), merged.graph).graph, 1e-6).graph
    op = only(found, "qmoe_linear")
    assert op.attr("gated") and not any(op.kind == "dequantize" for op in found.ops)


def test_rows_that_are_rounded_are_rounded_by_the_kernel() -> None:
    lines = [
        CODES.format("u4", "", ", zero=8"),
        STACK.replace("%a =", "%z =").replace("@w: f32[40,64]", "%w"),
    ]
    rounded = QuantizeActivations("i8", 16).run(read(body(*lines))).graph
    assert only(rounded, "quantize").args[0].name == "x"  # type: ignore[union-attr]
    op = only(apply(FuseDequant(), rounded, 1e-6).graph, "qmoe_linear")
    assert (op.attr("x_dtype"), op.attr("x_group_size"), op.args[0].name) == ("i8", 16, "x")  # type: ignore


def test_bf16_reaches_matrix_input_and_result() -> None:
    next_one = "%z = moe_linear %a, @v: f32[12,10], %e {num_experts=4} : f32[T,3,3]"
    wide = Cse().run(ConvertWeights("bf16").run(read(body(STACK, next_one))).graph).graph
    narrow = Cse().run(NarrowActivations("bf16").run(wide).graph).graph
    found = apply(FuseCasts(), Dce().run(narrow).graph, 0).graph
    first, second = (op for op in found.ops if op.kind == "moe_linear")
    assert [str(dtype(a)) for a in (*first.args[:2], first.args[3])] == ["bf16", "bf16", "f32"]
    assert first.attr("dtype") == "bf16" and second.args[0] == first.out and second.attr("dtype") == "f32"
