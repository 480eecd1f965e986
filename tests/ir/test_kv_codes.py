"""KV streams of codes: what is kept of a token, and what a query reads of full blocks and of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.interpret import empty_kv, interpret
from ir.ops import InferError
from ir.ops.kv_codes import decode, encode
from ir.predicates import CAUSAL
from ir.types import CHANNEL, KV, DType, Stream, Tensor
from ir.verify import VerifyError, verify
from tests.ir.test_attention_ops import written_out

T, R, M, N = (symbol(name) for name in "TRMN")
BLOCK, G, D, E = 4, 2, 3, 5
STEPS = {"i8": 127, "u4": 15, "u2": 3}


@pytest.mark.parametrize("per", ["token", "channel"])
@pytest.mark.parametrize("dtype", [DType.I8, DType.F8E4M3, DType.U4, DType.U2])
def test_codes_are_within_half_a_step(dtype: DType, per: str) -> None:
    if per == CHANNEL and dtype not in (DType.U4, DType.U2):
        return
    stream = Stream("k", dtype, G, D, per)
    x = np.random.default_rng(0).normal(3, 1, (6, BLOCK, G, D)).astype(np.float32)
    parts = encode(x, stream)
    assert [parts[p].shape[1:] for p in stream.parts] == [stream.part_shape(p, BLOCK) for p in stream.parts]
    axis = 1 if per == CHANNEL else 3
    span = x.max(axis, keepdims=True) - (x.min(axis, keepdims=True) if stream.has_minimum else 0)
    error = np.abs(decode(parts, stream) - x)
    bound = np.abs(x) / 16 + 1e-3 if dtype is DType.F8E4M3 else span / STEPS[str(dtype)] / 2
    assert (error <= 1.02 * bound + 2e-3).all() and error.max() > 1e-4


def test_bytes_count_scales() -> None:
    sizes = {
        Stream("k", DType.F32, 3, 64): 64 * 3 * 64 * 4,
        Stream("k", DType.I8, 3, 64): 64 * 3 * (64 + 2),
        Stream("k", DType.U4, 3, 64): 64 * 3 * (32 + 2 + 2),
        Stream("k", DType.U4, 3, 64, CHANNEL): 3 * 64 * (32 + 2 + 2),
        Stream("k", DType.U2, 3, 64, CHANNEL): 3 * 64 * (16 + 2 + 2),
    }
    assert {s: s.bytes_per_block(64) for s in sizes} == sizes


def states(bits: int) -> tuple[KV, KV]:
    dtype = DType(f"u{bits}")
    kv = KV((Stream("k", dtype, G, D, CHANNEL), Stream("v", dtype, G, E)), layers=2, block=BLOCK)
    plain = tuple(replace(s, dtype=DType.F32, per="token") for s in kv.streams)
    return kv, replace(kv, streams=plain, tail=True)


def step_graph(bits: int) -> Any:
    kv, tail = states(bits)
    b = GraphBuilder("step", {"T": (0, None), "R": (1, None), "M": (1, None), "N": (1, None)})
    i32 = DType.I32
    q, k, v = (
        b.input(n, Tensor(DType.F32, (T, h, d))) for n, h, d in (("q", 2 * G, D), ("k", G, D), ("v", G, E))
    )
    kv0, tail0, slots = b.input("kv", kv), b.input("tail", tail), b.input("slots", Tensor(i32, (T,)))
    table, own, lens, starts = (
        b.input(n, Tensor(i32, s))
        for n, s in (("table", (R, M)), ("own", (R, N)), ("lens", (R,)), ("starts", (R + 1,)))
    )
    written = b.op("kv_write", tail0, k, v, slots, layer=1)
    sealed = b.op("kv_seal", kv0, written, table, own, lens, starts, layer=1)
    out = b.op(
        "paged_attention", q, sealed, table, lens, starts, None, None, written, own,
        layer=1, scale=0.6, mask=CAUSAL,
    )  # fmt: skip
    graph = b.graph([out, sealed, written])
    verify(graph)
    return graph


def expected(q: Any, k: Any, v: Any, bits: int) -> Any:
    """Each query over full blocks as they decode, and its own block exactly."""
    kv, _ = states(bits)
    coded = []
    for x, stream in zip((k, v), kv.streams, strict=True):
        full = len(x) // BLOCK * BLOCK
        blocks = x[:full].reshape(-1, BLOCK, *x.shape[1:])
        back = decode(encode(blocks, stream), stream, np.float64).reshape(full, *x.shape[1:])
        coded.append(np.concatenate([back, x[full:]]))
    rows = []
    for p in range(len(q)):
        own = p // BLOCK * BLOCK
        keys, values = (np.concatenate([c[:own], x[own : p + 1]]) for c, x in zip(coded, (k, v), strict=True))
        one = written_out(
            q[p : p + 1].transpose(1, 0, 2), keys.transpose(1, 0, 2), values.transpose(1, 0, 2),
            lambda i, j: True, 0.6, 0, None, None,
        )  # fmt: skip
        rows.append(one)
    return np.concatenate(rows)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 18), min_size=1, max_size=3),
    st.integers(1, 9),
    st.sampled_from([4, 2]),
    st.integers(0, 2**32 - 1),
)
def test_full_blocks_are_read_quantised_and_the_own_block_exactly(
    lengths: list[int], chunk: int, bits: int, seed: int
) -> None:
    """Whatever the chunks; blocks of the tail that are full, and slots that are not written, are poisoned."""
    rng = np.random.default_rng(seed)
    graph, (kv, tail) = step_graph(bits), states(bits)
    all_inputs = [tuple(rng.normal(size=(n, h, d)) for h, d in ((2 * G, D), (G, D), (G, E))) for n in lengths]
    blocks = rng.permutation(24)[: 6 * len(lengths)].reshape(len(lengths), 6)
    cache, exact = empty_kv(kv, 24), empty_kv(tail, 24)
    done, found = [0] * len(lengths), [[] for _ in lengths]
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        sizes = [min(int(rng.integers(0, chunk + 1)), n - d) for d, n in zip(done, lengths, strict=True)]
        spans = [slice(d, d + s) for d, s in zip(done, sizes, strict=True)]
        q, k, v = (
            np.concatenate([seq[i][span] for seq, span in zip(all_inputs, spans, strict=True)])
            for i in range(3)
        )
        slots = [
            blocks[r, p // BLOCK] * BLOCK + p % BLOCK
            for r, s in enumerate(spans)
            for p in range(s.start, s.stop)
        ]
        done = [d + s for d, s in zip(done, sizes, strict=True)]
        starts = np.cumsum([0, *sizes])
        inputs = {
            "q": q, "k": k, "v": v, "kv": cache, "tail": exact, "slots": np.array(slots, np.int32),
            "table": blocks, "own": blocks, "lens": np.array(done), "starts": starts,
        }  # fmt: skip
        out, cache, exact = interpret(graph, inputs, {}, np.float64).outputs
        for r, d in enumerate(done):
            for array in exact.values():
                array[:, blocks[r, : d // BLOCK]] = np.nan
            found[r].append(out[starts[r] : starts[r + 1]])
    for (q, k, v), parts in zip(all_inputs, found, strict=True):
        np.testing.assert_allclose(np.concatenate(parts), expected(q, k, v, bits), rtol=1e-9, atol=1e-10)


def test_a_state_whose_scales_span_a_block_needs_its_tail() -> None:
    graph = step_graph(4)
    (attention,) = (op for op in graph.ops if op.kind == "paged_attention")
    alone = replace(attention, args=attention.args[:5])
    with pytest.raises(VerifyError, match="is read with its tail"):
        verify(replace(graph, ops=(*graph.ops[:-1], alone)))
    kv, tail = states(4)
    b = GraphBuilder("w", {"T": (0, None)})
    k, v = (b.input(s.name, Tensor(DType.F32, (T, s.heads, s.head_size))) for s in kv.streams)
    slots = b.input("slots", Tensor(DType.I32, (T,)))
    with pytest.raises(InferError, match="span a block"):
        b.op("kv_write", b.input("kv", kv), k, v, slots, layer=0)
    b.op("kv_write", b.input("tail", tail), k, v, slots, layer=0)


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        (replace(states(4)[1], window=4), "a tail has no window"),
        (replace(states(4)[0], tail=True), "not quantised"),
        (KV((Stream("k", DType.I8, 1, 1, CHANNEL),), 1), "scales are per token"),
        (KV((Stream("k", DType.U8, 1, 1),), 1), "float types or of i8"),
    ],
)
def test_states_that_make_no_sense(kv: KV, message: str) -> None:
    b = GraphBuilder("w", {})
    with pytest.raises(VerifyError, match=message):
        verify(b.graph([b.input("kv", kv)]))
