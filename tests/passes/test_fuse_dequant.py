"""fuse_dequant: linears, embeddings and cache writes of codes, seen through moves of rows."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from ir.graph import Graph
from ir.ops.kv_codes import decode, encode
from ir.types import DType, Stream
from passes.convert_weights import ConvertWeights
from passes.dce import Dce
from passes.fuse_dequant import FuseDequant
from passes.narrow_activations import NarrowActivations
from tests.passes.checks import apply, graph_text, read, refuse

HEAD = "graph @g(%x: f32[T,64], %ids: i32[T]) dims {T: 1..64} {"
body = partial(graph_text, HEAD)
ZERO = "%{0} = dequantize @{0}q: u4[8,64], @{0}s: f16[8,2] {{group_size=32, zero=8}} : f32[8,64]"
OFFSET = (
    "%{0} = dequantize @{0}q: u4[8,64], @{0}s: f16[8,2], _, @{0}m: f16[8,2] {{group_size=32}} : f32[8,64]"
)
ZEROS = "%{0} = dequantize @{0}q: u8[8,64], @{0}s: f32[8,1], @{0}z: u8[8,1] {{group_size=0}} : f32[8,64]"
LINEAR = "%z = linear %x, %w : f32[T,8]"
ROUNDED = [
    '%c, %cs = quantize %x {dtype="i8", group_size=16} : i8[T,64], f32[T,4]',
    "%y = dequantize %c, %cs {group_size=16} : f32[T,64]",
]


def fused(*lines: str) -> Graph:
    return apply(FuseDequant(), body(*lines), 1e-6).graph


@pytest.mark.parametrize("form", [ZERO, OFFSET, ZEROS])
def test_a_linear_reads_codes(form: str) -> None:
    (op,) = fused(form.format("w"), LINEAR).ops
    source = read(body(form.format("w"), LINEAR)).ops[0]
    assert op.kind == "qlinear" and op.args[1:] == source.args
    assert op.attr("zero") == source.attr("zero", 0) and op.attr("group_size") == source.attr("group_size")


def test_bias_residual_and_activation_go_along() -> None:
    linear = '%z = linear %x, %w, @b: f32[8], %r {activation="silu"} : f32[T,8]'
    residual = "%r = slice %x {axis=1, start=0, stop=8} : f32[T,8]"
    *_, op = fused(ZERO.format("w"), residual, linear).ops
    assert op.kind == "qlinear" and op.attr("activation") == "silu" and len(op.args) == 7
    assert op.args[3:5] == (None, None) and op.args[5].name == "b"  # type: ignore[union-attr]


def test_rows_that_are_rounded_are_the_linears_own_business() -> None:
    (op,) = fused(ZERO.format("w"), *ROUNDED, "%z = linear %y, %w : f32[T,8]").ops
    assert (op.attr("x_dtype"), op.attr("x_group_size"), op.args[0].name) == ("i8", 16, "x")  # type: ignore


@pytest.mark.parametrize("form", [ZERO, OFFSET, ZEROS])
def test_through_moves_of_rows(form: str) -> None:
    moves = [
        "%ab = concat %a, %b {axis=0} : f32[16,64]",
        "%hi = slice %ab {axis=0, start=4, stop=10} : f32[6,64]",
        "%w = concat %hi, %ab {axis=0} : f32[22,64]",
    ]
    graph = fused(form.format("a"), form.format("b"), *moves, "%z = linear %x, %w : f32[T,22]")
    assert graph.ops[-1].kind == "qlinear" and not any(op.kind == "dequantize" for op in graph.ops)


def test_an_embedding_and_the_head_share_codes() -> None:
    table = "%w = dequantize @wq: i8[64,64], @ws: f16[64,2] {group_size=32} : f32[64,64]"
    lines = [table, "%e = embed %ids, %w : f32[T,64]", "%z = linear %e, %w : f32[T,64]"]
    first, last = fused(*lines).ops
    assert (first.kind, last.kind) == ("qembed", "qlinear") and first.args[1:] == last.args[1:3]


def test_mixed_formats_are_left_and_noted() -> None:
    lines = ["%w = concat %a, %b {axis=0} : f32[16,64]", "%z = linear %x, %w : f32[T,16]"]
    refuse(FuseDequant(), body(ZERO.format("a"), OFFSET.format("b"), *lines), "several formats")


STATE = "kv[full: k {0}[2,4], v {0}[2,4]; block 4; layers 1]"
KV_HEAD = f"graph @g(%k: f32[T,2,4], %v: f32[T,2,4], %kv: {STATE}, %s: i32[T]) {{{{"
KV = [
    '%kc, %ks = quantize %k {dtype="i8", group_size=0, scale="f16"} : i8[T,2,4], f16[T,2,1]',
    "%kd = dequantize %kc, %ks {group_size=0} : f32[T,2,4]",
    f"%w = kv_write %kv, %kd, %v, %s {{{{layer=0}}}} : {STATE}",
]


@pytest.mark.parametrize(("dtype", "count"), [("i8", 1), ("f8e4m3", 0), ("f32", 0)])
def test_the_cache_quantises_what_it_writes(dtype: str, count: int) -> None:
    head = KV_HEAD.format(dtype).replace(") {", ") dims {T: 1..64} {")
    found = FuseDequant().run(read("\n".join([head, *KV[:2], KV[2].format(dtype), "return %w", "}"])))
    assert found.count == count
    kinds = [op.kind for op in Dce().run(found.graph).graph.ops]
    assert kinds == (["kv_write"] if count else ["quantize", "dequantize", "kv_write"])


def test_writing_what_was_rounded_gives_the_same_codes() -> None:
    for dtype in (DType.I8, DType.F8E4M3):
        stream = Stream("k", dtype, 2, 64)
        x = np.random.default_rng(0).normal(size=(500, 2, 64)).astype(np.float32)
        once = encode(x, stream)
        twice = encode(decode(once, stream), stream)
        for part in stream.parts:
            np.testing.assert_array_equal(once[part].view(np.uint8), twice[part].view(np.uint8))


@pytest.mark.parametrize("form", [ZERO, OFFSET, ZEROS])
def test_beside_bf16_matrices_codes_stay_codes(form: str) -> None:
    """What a linear reads becomes bf16 where it is no codes itself; a quantised matrix never does."""
    lines = [
        form.format("w"),
        *ROUNDED,
        "%a = linear %x, %w : f32[T,8]",
        "%b = linear %y, %w : f32[T,8]",
        "%e = embed %ids, %w : f32[T,64]",
        "%p = linear %e, @p: f32[8,64] : f32[T,8]",
        "%ab = add %a, %b : f32[T,8]",
        "%z = add %ab, %p : f32[T,8]",
    ]
    graph = read(body(*lines))
    for each in (ConvertWeights("bf16"), NarrowActivations("bf16"), FuseDequant(), Dce()):
        graph = each.run(graph).graph
    a, b = (op for op in graph.ops if op.kind == "qlinear")
    assert a.args[0].type.dtype is DType.BF16 and a.attr("x_dtype") is None  # type: ignore[union-attr]
    assert b.args[0].name == "x" and b.attr("x_dtype") == "i8"  # type: ignore[union-attr]
    assert [op.kind for op in graph.ops if op.kind in ("embed", "qembed", "dequantize")] == ["qembed"]
    (p,) = (op for op in graph.ops if op.kind == "linear")
    assert p.args[1].type.dtype is DType.BF16  # type: ignore[union-attr]
