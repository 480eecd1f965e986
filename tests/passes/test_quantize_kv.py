"""quantize_kv: codes with scales in place of numbers, tails where tokens share scales, and what calibration
found of the keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.graph import Graph, Weight
from ir.predicates import CAUSAL
from ir.text import parse, print_graph
from ir.types import KV, DType, Tensor
from ir.verify import verify
from passes.base import PassError
from passes.fuse_dequant import FuseDequant
from passes.page_kv import PageKv
from passes.paging.formats import FORMATS, KeyGrid
from passes.quantize_kv import QuantizeKv
from tests.passes.checks import read
from tests.passes.test_page_kv import KV_HEADS, SIZE, Toy, run_paged, two_layers, weights

PLAIN = "k f32[2,16], v f32[2,16]"
ATTEND = "{layer=0, scale=0.25, mask=k <= q} : f32[T,4,16]"


def group(streams: str, lifetime: str = "full") -> str:
    return f"kv[{lifetime}: {streams}; block 16; layers 1]"


def paged(streams: str, *lines: str, tail: str = "", outs: str = "%o, %s") -> str:
    """A graph of one attention. Its ops have the place "attn"."""
    inputs = [f"%kv0: {group(streams)}", "%slots0: i32[T]", "%table0: i32[R,M0]"]
    inputs += [f"%kv1: {group(tail, 'tail')}", "%slots1: i32[T]", "%table1: i32[R,M1]"] if tail else []
    head = "%q: f32[T,4,16], %k: f32[T,2,16], %v: f32[T,2,16], %lens: i32[R], %starts: i32[R+1]"
    dims = "T: 1..64, R: 1..8, M0: 1..4" + (", M1: 1..4" if tail else "")
    body = [f"{line}  // attn" for line in lines]
    return "\n".join(
        [f"graph @g({', '.join([head, *inputs])}) dims {{{dims}}} {{", *body, f"return {outs}", "}"]
    )


BEFORE = paged(
    PLAIN,
    f"%s = kv_write %kv0, %k, %v, %slots0 {{layer=0}} : {group(PLAIN)}",
    f"%o = paged_attention %q, %s, %table0, %lens, %starts {ATTEND}",
)


def changed(step: QuantizeKv, before: str) -> Graph:
    graph = step.run(read(before)).graph
    verify(graph)
    assert parse(print_graph(graph)) == graph
    return graph


def test_scales_of_a_token_are_ops_before_the_write_which_are_its_own_then() -> None:
    streams = "k i8[2,16], v i8[2,16]"
    codes = '{dtype="i8", group_size=0, scale="f16"} : i8[T,2,16], f16[T,2,1]'
    lines = (
        f"%v1, %v2 = quantize %k {codes}",
        "%v3 = dequantize %v1, %v2 {group_size=0} : f32[T,2,16]",
        f"%v4, %v5 = quantize %v {codes}",
        "%v6 = dequantize %v4, %v5 {group_size=0} : f32[T,2,16]",
        f"%s = kv_write %kv0, %v3, %v6, %slots0 {{layer=0}} : {group(streams)}",
        f"%o = paged_attention %q, %s, %table0, %lens, %starts {ATTEND}",
    )
    found = changed(QuantizeKv("int8"), BEFORE)
    assert print_graph(found) == print_graph(read(paged(streams, *lines)))
    written = next(op for op in FuseDequant().run(found).graph.ops if op.kind == "kv_write")
    assert [arg.name for arg in written.values] == ["kv0", "k", "v", "slots0"]


def test_what_tokens_share_scales_with_is_in_a_tail_until_its_block_is_full() -> None:
    streams, tail = "k u4 per channel[2,16], v u4[2,16]", "k bf16[2,16], v bf16[2,16]"
    lines = (
        f"%kv1.0 = kv_write %kv1, %k, %v, %slots1 {{layer=0}} : {group(tail, 'tail')}",
        f"%s = kv_seal %kv0, %kv1.0, %table0, %table1, %lens, %starts {{layer=0}} : {group(streams)}",
        f"%o = paged_attention %q, %s, %table0, %lens, %starts, _, _, %kv1.0, %table1 {ATTEND}",
    )
    wanted = paged(streams, *lines, tail=tail, outs="%o, %s, %kv1.0")
    assert print_graph(changed(QuantizeKv("int4"), BEFORE)) == print_graph(read(wanted))


def logits(graph: Graph, read_weight: Any, requests: list[np.ndarray], chunk: int) -> np.ndarray:
    return np.concatenate(run_paged(graph, read_weight, requests, chunk))


@pytest.mark.parametrize(
    ("format", "error"),
    [("int8", 0.05), ("fp8", 0.25), ("int4", 0.4), ("int2", 2.0), ("int4-token", 0.5)],
)
def test_the_cache_is_rounded_and_steps_do_not_matter(format: str, error: float) -> None:
    """A window and a full group: the same numbers as before but for the format's rounding, whatever the
    chunks."""
    graph = PageKv().run(two_layers()).graph
    read_weight = {name: array * 3 for name, array in weights(graph).items()}  # scores that matter
    requests = [np.random.default_rng(n).integers(0, 11, n) for n in (1, 37, 17, 33)]
    want = logits(graph, read_weight, requests, 40)
    step = QuantizeKv(format, tail="f32")
    quantized = step.run(graph).graph
    verify(quantized)
    states = [v for v in quantized.inputs if isinstance(v.type, KV)]
    assert [v.name for v in states] == [f"kv{i}" for i in range(len(states))]
    assert len(states) == (4 if FORMATS[format].per == "channel" else 2)
    found = [logits(quantized, read_weight, requests, chunk) for chunk in (40, 16, 7, 1)]
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], rtol=1e-9, atol=1e-9)
    difference = float(np.sqrt(np.mean((found[0] - want) ** 2) / np.mean(want**2)))
    assert 1e-5 < difference < error < step.tolerance
    fused = FuseDequant().run(quantized).graph
    np.testing.assert_array_equal(logits(fused, read_weight, requests, 40), found[0])


def test_a_requests_own_block_is_exact() -> None:
    graph = PageKv().run(two_layers()).graph
    read_weight = weights(graph)
    requests = [np.random.default_rng().integers(0, 11, n) for n in (16, 5)]  # none beyond a block
    quantized = QuantizeKv("int2", tail="f32").run(graph).graph
    want = logits(graph, read_weight, requests, 7)
    np.testing.assert_allclose(logits(quantized, read_weight, requests, 7), want, rtol=1e-6, atol=1e-6)


def calibrated(graph: Graph, format: str) -> tuple[QuantizeKv, dict[str, np.ndarray]]:
    """With random grids for each layer, and their arrays."""
    rng, arrays, keys = np.random.default_rng(), {}, {}
    for op in (op for op in graph.ops if op.kind == "kv_write"):
        scale = np.exp(rng.normal(size=(KV_HEADS, SIZE))).astype(np.float32)
        shift = rng.normal(size=(KV_HEADS, SIZE)).astype(np.float32)
        named = {f"{op.loc}.scale": scale, f"{op.loc}.inverse": 1 / scale, f"{op.loc}.shift": shift}
        arrays |= named
        parts = {n.rpartition(".")[2]: Weight(n, Tensor(DType.F32, a.shape)) for n, a in named.items()}
        keys[op.loc] = KeyGrid(parts["inverse"], parts["scale"], parts["shift"])
    return QuantizeKv(format, keys=keys), arrays


def test_scales_and_shifts_of_keys_cancel() -> None:
    """Query heads share key heads; the shift is one for all keys of a query."""
    graph = PageKv().run(two_layers()).graph
    step, arrays = calibrated(graph, "int8")
    read_weight = weights(graph) | arrays
    requests = [np.random.default_rng().integers(0, 11, n) for n in (20, 3)]
    want = logits(graph, read_weight, requests, 20)
    quantized = step.run(graph).graph
    found = logits(quantized, read_weight, requests, 20)
    assert 0 < np.sqrt(np.mean((found - want) ** 2) / np.mean(want**2)) < 0.05
    kinds = [op.kind for op in quantized.ops]
    assert kinds.count("sub") == 2 and kinds.count("quantize") == 4


def test_a_shift_that_a_softmax_does_not_cancel_is_left_out() -> None:
    toy = Toy()
    q, k, v = toy.heads(toy.x, "q", 6), toy.heads(toy.x, "k", KV_HEADS), toy.heads(toy.x, "v", KV_HEADS)
    out = toy.b.op("attention", q, k, v, scale=0.4, mask=CAUSAL, softcap=2.0, loc="model.attn")
    imported = toy.graph(toy.b.op("reshape", out, shape=(1, *out.type.shape[1:2], 30)))  # type: ignore[union-attr]
    graph = PageKv().run(imported).graph
    step, arrays = calibrated(graph, "int8")
    found = step.run(graph)
    assert not any(op.kind == "sub" for op in found.graph.ops)
    assert "would see the shift" in str(found.misses[0])
    read_weight = weights(graph) | arrays
    requests = [np.random.default_rng().integers(0, 11, 20)]
    want = logits(graph, read_weight, requests, 20)
    got = logits(found.graph, read_weight, requests, 20)
    assert np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 0.05


def test_keys_by_channel_need_no_calibration() -> None:
    graph = PageKv().run(two_layers()).graph
    step, _ = calibrated(graph, "int4")
    assert step.run(graph).graph == QuantizeKv("int4").run(graph).graph


def test_groups_may_have_formats_of_their_own() -> None:
    graph = PageKv().run(two_layers()).graph
    read_weight, requests = weights(graph), [np.random.default_rng().integers(0, 11, n) for n in (40, 3)]
    found = QuantizeKv("int8", groups=("none", "int4"), tail="f32").run(graph).graph
    verify(found)
    dtypes = [[str(s.dtype) for s in v.type.streams] for v in found.inputs if isinstance(v.type, KV)]
    assert dtypes == [["f32", "f32"], ["u4", "u4"], ["f32", "f32"]]
    assert QuantizeKv("int8", groups=("none", "int4")).tolerance == QuantizeKv("int4").tolerance
    want, got = (logits(g, read_weight, requests, 9) for g in (graph, found))
    assert 0 < np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)) < 0.4


def test_blocks_that_strips_do_not_fill_are_refused() -> None:
    graph = PageKv(block=8).run(two_layers()).graph
    with pytest.raises(PassError, match="blocks of 8 tokens.*\n.*--block 64"):
        QuantizeKv("int4").run(graph)
    verify(QuantizeKv("int8").run(graph).graph)


@pytest.mark.parametrize("options", [dict(format="int3"), dict(format="int4", tail="i8")])
def test_formats_that_are_not_there_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="quantize_kv"):
        QuantizeKv(**options)
