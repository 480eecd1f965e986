"""merge_linears: which linears are merged, in what order, and which are left alone."""

from __future__ import annotations

from functools import partial

from ir.graph import Graph, Op
from passes.fuse_epilogue import FuseEpilogue
from passes.merge_linears import MergeLinears
from tests.passes.checks import apply, expect, graph_text

HEAD = "graph @g(%x: f32[1,S,8], %y: f32[1,S,8]) dims {S: 1..64} {"
body = partial(graph_text, HEAD)

QKV = [
    "%l0.q = linear %x, @wq: f32[12,8] : f32[1,S,12] // h.0.attn.q",
    "%l0.k = linear %x, @wk: f32[4,8] : f32[1,S,4] // h.0.attn.k",
    "%l0.v = linear %x, @wv: f32[4,8] : f32[1,S,4] // h.0.attn.v",
    "%a = concat %l0.k, %l0.v, %l0.k {axis=2} : f32[1,S,12]",
    "%z = mul %l0.q, %a : f32[1,S,12]",
]


def linears(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.kind == "linear"]


def test_query_key_and_value_become_one() -> None:
    after = body(
        "%v1 = concat @wq: f32[12,8], @wk: f32[4,8], @wv: f32[4,8] {axis=0} : f32[20,8] // h.0.attn",
        "%l0.q_k_v = linear %x, %v1 : f32[1,S,20] // h.0.attn",
        "%l0.q, %l0.k, %l0.v = split %l0.q_k_v {axis=2, sizes=[12,4,4]} : f32[1,S,12], f32[1,S,4], f32[1,S,4]"
        " // h.0.attn",
        *QKV[3:],
    )
    expect(MergeLinears(), body(*QKV), after)
    assert apply(MergeLinears(), after).count == 0  # once only


def test_missing_biases_are_zeros() -> None:
    lines = [QKV[0].replace("@wq: f32[12,8]", "@wq: f32[12,8], @bq: f32[12]"), *QKV[1:]]
    (merged,) = linears(apply(MergeLinears(), body(*lines)).graph)
    assert merged.args[2].type.shape == (20,)  # type: ignore[union-attr]


def test_weights_made_later_than_the_first_linear_are_made_before_it() -> None:
    lines = [*QKV[:2], "%w = transpose @wv: f32[8,4] {perm=[1,0]} : f32[4,8]"]
    lines += [QKV[2].replace("@wv: f32[4,8]", "%w"), *QKV[3:]]
    kinds = [op.kind for op in apply(MergeLinears(), body(*lines)).graph.ops]
    assert kinds == ["transpose", "concat", "linear", "split", "concat", "mul"]


GATE = [
    "%up = linear %x, @wu: f32[6,8] : f32[1,S,6]",
    "%gate = linear %x, @wg: f32[6,8] : f32[1,S,6]",
    "%s = silu %gate : f32[1,S,6]",
    "%h = mul %up, %s : f32[1,S,6]",
]


def test_a_gate_comes_first_and_the_epilogue_folds_the_product() -> None:
    found = apply(MergeLinears(), body(*GATE, out="h"))
    (split,) = [op for op in found.graph.ops if op.kind == "split"]
    assert [o.name for o in split.outs] == ["gate", "up"]
    (gated,) = linears(apply(FuseEpilogue(), found.graph).graph)
    assert gated.attrs == {"activation": "silu", "gated": True}


def test_attention_and_gate_of_one_norm_are_two_groups() -> None:
    lines = [*QKV[:3], *GATE, "%a = concat %l0.k, %l0.v, %l0.k, %h {axis=2} : f32[1,S,18]"]
    lines += ["%b = concat %l0.q, %h {axis=2} : f32[1,S,18]", "%z = mul %a, %b : f32[1,S,18]"]
    found = apply(MergeLinears(), body(*lines))
    assert sorted(int(op.args[1].type.shape[0]) for op in linears(found.graph)) == [12, 20]  # type: ignore[union-attr]
    assert found.count == 2


def test_what_an_activation_reads_stays_alone() -> None:
    lines = [*QKV[:4], "%u = linear %x, @wu: f32[12,8] : f32[1,S,12]", "%g = gelu %u : f32[1,S,12]"]
    lines += ["%b = mul %l0.q, %a : f32[1,S,12]", "%z = add %b, %g : f32[1,S,12]"]
    found = apply(MergeLinears(), body(*lines))
    assert len(linears(found.graph)) == 2
    assert any("activation reads it" in str(m) for m in found.misses)


def test_other_inputs_and_outputs_that_are_cut_up_are_left_alone() -> None:
    other = [QKV[0], QKV[1].replace("%x", "%y"), QKV[2].replace("@wv: f32[4,8]", "@wv: bf16[4,8]"), *QKV[3:]]
    assert apply(MergeLinears(), body(*other)).count == 0
    cut = [
        "%a = linear %x, @wa: f32[12,8] : f32[1,S,12]",
        "%b = linear %x, @wb: f32[6,8] : f32[1,S,6]",
        "%p, %q = split %a {axis=2, sizes=[6,6]} : f32[1,S,6], f32[1,S,6]",
        "%r = sub %p, %q : f32[1,S,6]",
        "%z = add %r, %b : f32[1,S,6]",
    ]
    assert apply(MergeLinears(), body(*cut)).count == 0


def test_weights_that_are_computed_from_tokens_are_left_alone() -> None:
    text = """graph @g(%x: f32[4,8], %u: f32[4,8]) {
    %a = linear %x, %u : f32[4,4]
    %b = linear %x, @w: f32[4,8] : f32[4,4]
    %z = sub %a, %b : f32[4,4]
    return %z
    }"""
    assert apply(MergeLinears(), text).count == 0
