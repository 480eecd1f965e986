"""Attention against a loop over queries and keys; paged attention against attention on whole sequences."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ir.build import GraphBuilder
from ir.dims import FloorDiv, Table, symbol
from ir.interpret import InterpretError, empty_kv, interpret
from ir.ops import InferError
from ir.predicates import CAUSAL, KEY, QUERY, window
from ir.types import KV, DType, Stream, Tensor
from tests.ir.run import result

T, R, M = symbol("T"), symbol("R"), symbol("M")
TABLE = np.random.default_rng(9).random((40, 40)) < 0.6
CHUNKED = CAUSAL & (FloorDiv(KEY, 4) >= FloorDiv(QUERY, 4))
TABLED = CAUSAL & (Table(0, QUERY, KEY) | (KEY >= QUERY))
MASKS: dict[str, tuple[Any, Any]] = {  # predicate, the same in Python
    "causal": (CAUSAL, lambda q, k: k <= q),
    "window": (CAUSAL & window(5), lambda q, k: q - 5 < k <= q),
    "chunks": (CHUNKED, lambda q, k: k <= q and k // 4 == q // 4),
    "table": (TABLED, lambda q, k: k == q or (k < q and bool(TABLE[q, k]))),
}


def added(bias: Any, head: int, distance: int) -> float:
    """By slopes [H], or by numbers [H,N], the last of which is for all further distances."""
    if bias is None:
        return 0.0
    if bias.ndim == 1:
        return -bias[head] * distance
    row = bias[head].tolist()
    return row[distance] if 0 <= distance < len(row) else row[-1] if distance > 0 else row[0]


def written_out(
    q: Any, k: Any, v: Any, keep: Any, scale: float, softcap: float, sinks: Any, bias: Any
) -> Any:
    """One head group, query and element at a time: q [H,S,D], k [G,S,D], v [G,S,E] -> [S,H,E]."""
    heads, count = q.shape[:2]
    out = np.zeros((count, heads, v.shape[-1]))
    for h, i in np.ndindex(heads, count):
        g = h // (heads // k.shape[0])
        weights: dict[int, float] = {}
        for j in range(k.shape[1]):
            if keep(i, j):
                score = scale * math.fsum(float(a) * float(b) for a, b in zip(q[h, i], k[g, j], strict=True))
                score = softcap * math.tanh(score / softcap) if softcap else score
                weights[j] = math.exp(score + added(bias, h, i - j))
        total = math.fsum(weights.values()) + (math.exp(sinks[h]) if sinks is not None else 0.0)
        for e in range(v.shape[-1]):
            out[i, h, e] = math.fsum(w * v[g, j, e] for j, w in weights.items()) / total
    return out


def inputs(heads: int, kv_heads: int, count: int, d: int = 3, e: int = 5, seed: int = 0) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)
    shapes = ((heads, count, d), (kv_heads, count, d), (kv_heads, count, e), (heads,), (heads,))
    return tuple(rng.normal(size=s) for s in shapes)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (6, 2), (5, 1)])
@pytest.mark.parametrize("options", ["", "softcap", "sinks", "slopes", "softcap+sinks+slopes"])
def test_attention(mask: str, heads: int, kv_heads: int, options: str) -> None:
    q, k, v, sinks, slopes = inputs(heads, kv_heads, 9)
    predicate, keep = MASKS[mask]
    softcap = 0.7 if "softcap" in options else 0.0
    sinks, slopes = sinks if "sinks" in options else None, slopes if "slopes" in options else None
    tables = [TABLE] if mask == "table" else []
    operands = [q[None], k[None], v[None], None, sinks, slopes, *tables]
    got = result("attention", *operands, wide=True, scale=0.6, mask=predicate, softcap=softcap)
    expected = written_out(q, k, v, keep, 0.6, softcap, sinks, slopes)
    np.testing.assert_allclose(got[0], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("distances", [1, 4, 9, 20])
@pytest.mark.parametrize("mask", [*MASKS, "ahead"])
def test_a_bias_by_distance(mask: str, distances: int) -> None:
    q, k, v, sinks, _ = inputs(6, 2, 9)
    bias = np.random.default_rng(distances).normal(size=(6, distances))
    predicate, keep = MASKS.get(mask, (KEY <= QUERY + 2, lambda q, k: k <= q + 2))
    tables = [TABLE] if mask == "table" else []
    operands = [q[None], k[None], v[None], None, sinks, bias, *tables]
    got = result("attention", *operands, wide=True, scale=0.6, mask=predicate, softcap=0.7)
    expected = written_out(q, k, v, keep, 0.6, 0.7, sinks, bias)
    np.testing.assert_allclose(got[0], expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("shape", [(7, 7), (1, 7, 7), (1, 1, 7, 7), (1, 4, 7, 7), (7, 1)])
@pytest.mark.parametrize("slopes", [False, True])
def test_a_mask_operand_selects_or_is_added(shape: tuple[int, ...], slopes: bool) -> None:
    q, k, v, _, per_head = inputs(4, 2, 7, seed=1)
    given = per_head if slopes else None
    allowed = np.random.default_rng(2).random(shape) < 0.7
    allowed |= (
        np.broadcast_to(np.eye(7, dtype=bool), np.broadcast_shapes(shape, (7, 7))) if shape[-1] == 7 else True
    )
    whole = np.broadcast_to(allowed, (1, 4, 7, 7))[0]
    heads = [
        written_out(
            q[h : h + 1],
            k[h // 2, None],
            v[h // 2, None],
            lambda i, j, h=h: whole[h, i, j],
            1.0,
            0.0,
            None,
            None if given is None else given[h : h + 1],
        )
        for h in range(4)
    ]
    expected = np.concatenate(heads, axis=1)
    got = result("attention", q[None], k[None], v[None], allowed, None, given, wide=True, scale=1.0)
    np.testing.assert_allclose(got[0], expected, rtol=1e-11, atol=1e-12)
    added = np.where(allowed, 0.0, -math.inf)
    got = result("attention", q[None], k[None], v[None], added, None, given, wide=True, scale=1.0)
    np.testing.assert_allclose(got[0], expected, rtol=1e-11, atol=1e-12)


def test_without_a_mask_every_key_is_seen() -> None:
    q, k, v, _, _ = inputs(2, 1, 4)
    expected = written_out(q, k, v, lambda i, j: True, 1.0, 0.0, None, None)
    np.testing.assert_allclose(
        result("attention", q[None], k[None], v[None], wide=True, scale=1.0)[0], expected
    )


STATE = KV((Stream("k", DType.F32, 2, 3), Stream("v", DType.F32, 2, 5)), layers=2, block=4)


def step_graph(mask: str, options: str) -> Any:
    """One write and one attention over it, in the second of two layers."""
    b = GraphBuilder("step", {"T": (0, None), "R": (0, None), "M": (1, None)})
    f32, i32 = DType.F32, DType.I32
    q, k, v = (b.input(n, Tensor(f32, (T, h, d))) for n, h, d in (("q", 6, 3), ("k", 2, 3), ("v", 2, 5)))
    kv, slots = b.input("kv", STATE), b.input("slots", Tensor(i32, (T,)))
    table, lens, starts = (
        b.input(n, Tensor(i32, s)) for n, s in (("table", (R, M)), ("lens", (R,)), ("starts", (R + 1,)))
    )
    sinks = b.input("sinks", Tensor(f32, (6,))) if "sinks" in options else None
    size = (6, 5) if "distances" in options else (6,)
    bias = b.input("bias", Tensor(f32, size)) if "slopes" in options or "distances" in options else None
    tables = [b.input("blocks", Tensor(DType.BOOL, (40, 40)))] if mask == "table" else []
    written = b.op("kv_write", kv, k, v, slots, layer=1)
    softcap = 0.7 if "softcap" in options else 0.0
    out = b.op(
        "paged_attention", q, written, table, lens, starts, sinks, bias, None, None, *tables,
        layer=1, scale=0.6, mask=MASKS[mask][0], softcap=softcap,
    )  # fmt: skip
    return b.graph([out, written])


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 21), min_size=1, max_size=3),
    st.sampled_from(sorted(MASKS)),
    st.sampled_from(["", "softcap", "sinks+slopes", "distances"]),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
)
def test_packed_requests_in_chunks_give_what_each_gives_whole(
    lengths: list[int], mask: str, options: str, chunk: int, seed: int
) -> None:
    """Slots that are not written, and blocks that have left every window, hold NaN throughout."""
    rng = np.random.default_rng(seed)
    graph = step_graph(mask, options)
    sequences = [inputs(6, 2, n, seed=seed % 1000 + i)[:3] for i, n in enumerate(lengths)]
    sinks, bias = rng.normal(size=6), rng.normal(size=(6, 5) if "distances" in options else 6)
    blocks = rng.permutation(32)[: 6 * len(lengths)].reshape(len(lengths), 6)
    state = empty_kv(STATE, 32)
    found: list[list[Any]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        sizes = [min(int(rng.integers(0, chunk + 1)), n - d) for d, n in zip(done, lengths, strict=True)]
        spans = [slice(d, d + s) for d, s in zip(done, sizes, strict=True)]
        q, k, v = (
            np.concatenate(
                [seq[i].transpose(1, 0, 2)[span] for seq, span in zip(sequences, spans, strict=True)]
            )
            for i in range(3)
        )
        slots = [blocks[r, p // 4] * 4 + p % 4 for r, s in enumerate(spans) for p in range(s.start, s.stop)]
        done = [d + s for d, s in zip(done, sizes, strict=True)]
        starts = np.cumsum([0, *sizes])
        given = {
            "q": q, "k": k, "v": v, "kv": state, "slots": np.array(slots, np.int32), "table": blocks,
            "lens": done, "starts": starts, "sinks": sinks, "bias": bias, "blocks": TABLE,
        }  # fmt: skip
        out, state = interpret(graph, given, {}, np.float64).outputs
        if mask == "window":
            for r, d in enumerate(done):
                for gone in range(max(0, d - 4) // 4):
                    state["k"][:, blocks[r, gone]] = state["v"][:, blocks[r, gone]] = np.nan
        for r in range(len(lengths)):
            found[r].append(out[starts[r] : starts[r + 1]])
    assert np.isnan(state["k"][0]).all() and np.isnan(state["v"][0]).all()  # the other layer
    for (q, k, v), parts in zip(sequences, found, strict=True):
        tables = [TABLE] if mask == "table" else []
        given_sinks = sinks if "sinks" in options else None
        given_bias = bias if "slopes" in options or "distances" in options else None
        whole = result(
            "attention", q[None], k[None], v[None], None, given_sinks, given_bias, *tables, wide=True,
            scale=0.6, mask=MASKS[mask][0], softcap=0.7 if "softcap" in options else 0.0,
        )  # fmt: skip
        np.testing.assert_allclose(np.concatenate(parts), whole[0], rtol=1e-10, atol=1e-11)


def write(kv: KV, slots: list[int], state: Any, k: Any, v: Any, **attrs: Any) -> Any:
    b = GraphBuilder("w", {"T": (0, None)})
    streams = [b.input(s.name, Tensor(DType.F32, (T, s.heads, s.head_size))) for s in kv.streams]
    out = b.op("kv_write", b.input("kv", kv), *streams, b.input("slots", Tensor(DType.I32, (T,))), **attrs)
    given = {"k": k, "v": v, "kv": state, "slots": np.array(slots, np.int32)}
    return interpret(b.graph([out]), given, {}).outputs[0]


def test_a_write_fills_its_slots_alone_and_leaves_the_old_state() -> None:
    state = empty_kv(STATE, 3)
    assert all(np.isnan(a).all() for a in state.values())
    k, v = np.ones((2, 2, 3), np.float32), np.full((2, 2, 5), 2, np.float32)
    after = write(STATE, [9, 2], state, k, v, layer=1)
    assert all(np.isnan(a).all() for a in state.values())
    assert (after["k"][1, 2, 1] == 1).all() and (after["v"][1, 0, 2] == 2).all()
    assert np.isfinite(after["k"]).sum() == 12 and np.isfinite(after["v"]).sum() == 20
    assert write(STATE, [], state, k[:0], v[:0], layer=0)["k"].shape == (2, 3, 4, 2, 3)


def test_a_narrow_stream_rounds_what_is_written() -> None:
    kv = KV((Stream("k", DType.BF16, 1, 1), Stream("v", DType.F16, 1, 1)), layers=1, block=1)
    after = write(kv, [0], empty_kv(kv, 1), np.full((1, 1, 1), 1 + 2.0**-9), np.full((1, 1, 1), 1e6), layer=0)
    assert float(after["k"].item()) == 1.0 and float(after["v"].item()) == math.inf


@pytest.mark.parametrize("slot", [-1, 12])
def test_a_slot_outside_the_cache_is_refused(slot: int) -> None:
    with pytest.raises(InterpretError, match="leave a cache of 12 slots in\n.*kv_write"):
        write(STATE, [slot], empty_kv(STATE, 3), np.ones((1, 2, 3)), np.ones((1, 2, 5)), layer=0)


def test_the_result_is_rounded_to_the_type_asked_for() -> None:
    """A query that sees one key gives that key's value."""
    b = GraphBuilder("one", {})
    types = {"table": (1, 1), "lens": (1,), "starts": (2,)}
    q, kv = b.input("q", Tensor(DType.F32, (1, 2, 3))), b.input("kv", STATE)
    args = [b.input(n, Tensor(DType.I32, s)) for n, s in types.items()]
    out = b.op("paged_attention", q, kv, *args, layer=0, scale=1.0, mask=CAUSAL, dtype="bf16")
    state = empty_kv(STATE, 1)
    state["k"][0, 0, 0], state["v"][0, 0, 0] = 1.0, 1 + 3 * 2.0**-9
    given = {"q": np.ones((1, 2, 3), np.float32), "kv": state, "table": [[0]], "lens": [1], "starts": [0, 1]}
    (found,) = interpret(b.graph([out]), given, {}).outputs
    assert found.dtype == DType.BF16.numpy and (found.astype(float) == 1 + 2.0**-7).all()


def test_a_query_that_sees_no_key_gives_nan_or_what_its_sink_leaves() -> None:
    q = np.ones((1, 1, 2, 3))
    never = KEY < QUERY
    assert np.isnan(result("attention", q, q, q, scale=1.0, mask=never)[0, 0]).all()
    assert result("attention", q, q, q, None, np.zeros(1), scale=1.0, mask=never)[0, 0].tolist() == [
        [0, 0, 0]
    ]


Q = (1, 4, 7, 3)


@pytest.mark.parametrize(
    ("shapes", "attrs", "message"),
    [
        ([Q, (1, 3, 7, 3), (1, 3, 7, 3)], {}, "4 query heads are not a multiple of 3"),
        ([Q, (1, 0, 7, 3), (1, 0, 7, 3)], {}, "4 query heads are not a multiple of 0"),
        ([Q, (1, 2, 7, 4), (1, 2, 7, 3)], {}, "do not fit"),
        ([Q, (1, 2, 6, 3), (1, 2, 6, 3)], {}, "do not fit"),
        ([(2, 4, 7, 3)] * 3, {}, r"must be \[1,heads,S,head_size\]"),
        ([Q, Q, Q, (7, 6)], {}, "do not broadcast"),
        ([Q, Q, Q, (7, 7)], {"mask": CAUSAL}, "both a mask operand and a mask predicate"),
        ([Q, Q, Q, None, (3,)], {}, "not one float per head"),
        ([Q, Q, Q, None, None, (4, 1, 1)], {}, "not one float per head"),
        ([Q, Q, Q, None, None, (3, 7)], {}, r"not floats \[4,N\] by distance"),
        ([Q, Q, Q, None, None, (4, 0)], {}, r"not floats \[4,N\] by distance"),
        ([Q, Q, Q, None, None, None, (7, 7)], {"mask": TABLED}, "must be a boolean matrix"),
        ([Q, Q, Q], {"mask": TABLED}, "reads a table that is not given; there are 0"),
        ([Q, Q, Q], {"mask": "k <= q"}, "not a mask predicate"),
        ([Q, Q, Q], {"mask": T > QUERY}, "T is not an integer expression over q and k"),
        ([Q, Q, Q], {"softcap": -1.0}, "softcap must not be negative"),
        ([Q, Q, Q], {"scale": True}, "scale must be a number"),
    ],
)  # fmt: skip
def test_what_does_not_fit(shapes: list[Any], attrs: dict[str, Any], message: str) -> None:
    with pytest.raises(InferError, match=f"^attention: .*{message}"):
        result("attention", *(None if s is None else np.ones(s) for s in shapes), **{"scale": 1.0, **attrs})
