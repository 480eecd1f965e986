"""The verifier: each rule has a graph that breaks it, and the message points at the op."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ir.dims import symbol
from ir.graph import Graph, Op, Scalar, Value, Weight
from ir.text import parse, print_op
from ir.types import KV, DType, Stream, Tensor
from ir.verify import VerifyError, verify

STATE = "kv[full: k f32[1,2], v f32[1,2]; block 16; layers 2]"
WRITE = "kv_write %kv, %x, %x, %slots {layer=0}"
READ = "paged_attention %x, %kv, %table, %lens, %starts {layer=0, scale=1.0, mask=k <= q} : f32[T,1,2]"
X = Value("x", Tensor(DType.F32, (symbol("T"), 4)))


def graph_of(*ops: str, result: str = "%x", dims: str = "T: 1..8") -> Graph:
    body = "\n".join(f"  {op}" for op in ops)
    return parse(f"graph @g(%x: f32[T,4], %i: i32[T]) dims {{{dims}}} {{\n{body}\n  return {result}\n}}")


def paged(*ops: str, result: str) -> Graph:
    inputs = (
        f"%kv: {STATE}, %x: f32[T,1,2], %slots: i32[T], %table: i32[R,M], %lens: i32[R], %starts: i32[R + 1]"
    )
    body = "\n".join(f"  {op}" for op in ops)
    dims = "T: 1.., R: 1.., M: 1.."
    return parse(f"graph @g({inputs}) dims {{{dims}}} {{\n{body}\n  return {result}\n}}")


def refused(graph: Graph, message: str, op: int | None) -> str:
    with pytest.raises(VerifyError) as found:
        verify(graph)
    text = str(found.value)
    assert message in found.value.reason
    if op is None:
        assert found.value.op is None
    else:
        assert found.value.op is graph.ops[op]
        assert f"  {print_op(graph.ops[op])}\n  ^^^ {found.value.reason}" in text
    return text


def test_a_graph_without_faults_passes() -> None:
    verify(graph_of("%y = add %x, 1.0 : f32[T,4]", "%z = mul %y, @w: f32[4] : f32[T,4]", result="%z"))
    verify(paged(f"%kv1 = {WRITE} : {STATE}", f"%y = {READ.replace('%kv', '%kv1')}", result="%y, %kv1"))


def test_the_arrow_stands_under_the_op_among_its_neighbours() -> None:
    ops = [f"%a{i} = neg %x : f32[T,4]" for i in range(12)]
    ops[6] = "%a6 = neg %x : f32[T,5]"
    text = refused(graph_of(*ops), "result types are f32[T,5], but the operands give f32[T,4]", 6)
    assert text.splitlines()[1:] == [
        "  ...",
        *(f"  {o}" for o in ops[3:7]),
        "  ^^^ result types are f32[T,5], but the operands give f32[T,4]",
        *(f"  {o}" for o in ops[7:10]),
        "  ...",
    ]


@pytest.mark.parametrize(
    ("op", "message"),
    [
        ("%y = nop %x : f32[T,4]", "there is no op 'nop'"),
        ("%y = neg %x {axis=0} : f32[T,4]", "neg: no attribute 'axis'"),
        ("%y = sum %x : f32[T]", "sum: attribute 'axes' is required"),
        ("%y = neg : f32[T,4]", "neg: takes x; got 0 operands"),
        ("%y = neg %x, %x : f32[T,4]", "neg: takes x; got 2 operands"),
        ("%y = neg _ : f32[T,4]", "operand 0 (x) is required"),
        ("%y = add %x, %i : f32[T,4]", "one element type"),
        ("%y = add %i, 0.5 : i32[T]", "the literal 0.5 does not fit operands of type i32"),
        ("%y = add %x, true : f32[T,4]", "the literal True does not fit operands of type f32"),
        ("%y = neg %x : f64[T,4]", "result types are f64[T,4]"),
        ("%y, %z = neg %x : f32[T,4], f32[T,4]", "result types are f32[T,4], f32[T,4]"),
        (
            "%y = add %x, @w: f32[U] : f32[T,4]",
            "@w: f32[U] has the size U, which the graph gives no bounds for",
        ),
        ("%y = full {shape=[U], value=1.0} : f32[U]", "attribute shape: the graph gives no bounds for U"),
        ("%y = neg %x {at=[0]} : f32[T,4]", "at=(0,) is not one of 0 buffers"),
        ("%y = neg %x {at=0} : f32[T,4]", "at=0 is not one of 0 buffers"),
        ("%y = add %x, @w: kv[full: k f32[1,1]; block 0; layers 1] : f32[T,4]", "are at least 1"),
    ],
)
def test_bad_ops(op: str, message: str) -> None:
    refused(graph_of("%a = neg %x : f32[T,4]", op), message, 1)


def test_names_are_defined_once_and_before_use() -> None:
    neg = Op("neg", (X,), {}, (Value("y", X.type),))
    g = Graph("g", {"T": (1, 8)}, (X,), (neg,), (X,))
    refused(replace(g, ops=(neg, replace(neg))), "%y is defined twice", 1)
    refused(replace(g, ops=(replace(neg, outs=(X,)),)), "%x is defined twice", 0)
    refused(replace(g, inputs=(X, X)), "%x is defined twice", None)
    late = replace(neg, args=(Value("z", X.type),))
    refused(replace(g, ops=(late,)), "operand %z is not defined before this op", 0)
    other = replace(neg, args=(Value("x", Tensor(DType.F32, (3,))),))
    refused(replace(g, ops=(other,)), "operand %x has type f32[T,4]", 0)
    refused(replace(g, outputs=(Value("z", X.type),)), "output %z is not defined", None)
    refused(
        replace(g, outputs=(Value("x", Tensor(DType.F32, ())),)), "output %x is not defined with type", None
    )


def test_a_weight_has_one_type() -> None:
    ops = ("%a = add %x, @w: f32[4] : f32[T,4]", "%b = add %x, @w: f32[1] : f32[T,4]")
    refused(graph_of(*ops), "@w: f32[1] was @w: f32[4] before", 1)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({}, "gives no bounds for"),
        ({"T": (5, 2)}, "bounds 5..2"),
        ({"T": (-1, 2)}, "bounds -1..2"),
        ({"T": (1, 2), "a b": (1, 2)}, "'a b' cannot be the name of a size"),
        ({"T": (1, 2), "mod": (1, 2)}, "'mod' cannot be the name of a size"),
    ],
)
def test_sizes_need_sensible_names_and_bounds(dims: dict[str, tuple[int, int]], message: str) -> None:
    refused(Graph("g", dims, (X,), (), ()), message, None)


@pytest.mark.parametrize(
    "state",
    [
        KV((Stream("k", DType.F32, 1, 2), Stream("k", DType.F32, 1, 2)), 1),
        KV((Stream("a b", DType.F32, 1, 2),), 1),
        KV((Stream("k", DType.F32, 0, 2),), 1),
        KV((Stream("k", DType.F32, 1, 2),), 0),
        KV((Stream("k", DType.F32, 1, 2),), 1, window=0),
        KV((Stream("k", DType.F32, 1, 2),), 1, block=-16),
    ],
)
def test_states_make_sense(state: KV) -> None:
    refused(Graph("g", {}, (Value("kv", state),), (), ()), "%kv: ", None)


def test_sizes_are_not_negative() -> None:
    refused(Graph("g", {}, (Value("x", Tensor(DType.F32, (-1,))),), (), ()), "%x has the size -1", None)


def test_a_state_is_written_once_and_not_read_afterwards() -> None:
    write = f"%kv1 = {WRITE} : {STATE}"
    again = paged(write, f"%kv2 = {WRITE} : {STATE}", result="%kv1")
    refused(again, "%kv was overwritten by %kv1 and cannot be used again", 1)
    refused(paged(write, f"%y = {READ}", result="%kv1"), "%kv was overwritten by %kv1", 1)
    refused(paged(write, result="%kv"), "the output %kv is overwritten here", 0)
    verify(paged(f"%y = {READ}", write, result="%y, %kv1"))


def test_a_state_stands_only_where_an_op_takes_it() -> None:
    refused(paged("%y = neg %kv : f32[T,1,2]", result="%y"), "operand 0 (x) must be a tensor", 0)
    bad = READ.replace("%x, %kv", "%kv, %x")
    refused(paged(f"%y = {bad}", result="%y"), "operand 0 (q) must be a tensor", 0)
    bad = READ.replace("%kv", "%table")
    refused(paged(f"%y = {bad}", result="%y"), "operand 1 (kv) must be a kv state", 0)


def test_an_odd_attribute_name_is_refused() -> None:
    op = Op("neg", (X,), {"at": (0,), "group": 1}, (Value("y", X.type),))
    verify(Graph("g", {"T": (1, 8)}, (X,), (op,), (), (64,)))
    assert Scalar(1) != Scalar(True) and Scalar(1) != Scalar(1.0) and Scalar(0.0) != Scalar(-0.0)
    assert Weight("w", X.type) != Value("w", X.type)
