"""A whole lowered model of two layers, with a windowed and a full KV group, against the interpreter."""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from ir.dims import symbol
from ir.graph import Graph, Scalar, Value
from ir.text import parse, print_graph
from ir.types import KV, DType, Stream
from tests.codegen.harness import (
    Chunk,
    Model,
    arg,
    empty_states,
    levels,
    lower,
    paged_builder,
    pointer,
    reference_step,
    weight,
)
from tests.codegen.test_attention import predicate

T = symbol("T")
V, H, HEADS, G, D, I = 101, 48, 3, 1, 16, 56  # noqa: E741
BLOCKS = 24
MASKS = ("(k <= q) & (q - k < 20)", "k <= q")


def graph() -> Graph:
    kv = KV((Stream("k", DType.F32, G, D), Stream("v", DType.F32, G, D)), 1)
    b, states = paged_builder(replace(kv, window=20), kv)
    x = b.op("embed", arg(b, "ids"), weight("embed", V, H))
    pos = b.op("reshape", b.op("cast", arg(b, "pos"), dtype="f32"), shape=(T, 1, 1))
    angle = b.op("mul", pos, weight("inv_freq", D // 2))
    cos, sin = b.op("cos", angle), b.op("sin", angle)
    written: list[Value] = []
    for n, mask in enumerate(MASKS):
        y = b.op("rms_norm", x, weight(f"{n}.ln1", H), eps=1e-5, loc=f"layers.{n}.norm")
        y = b.op(
            "linear",
            y,
            weight(f"{n}.qkv", (HEADS + 2 * G) * D, H),
            weight(f"{n}.qkv_bias", (HEADS + 2 * G) * D),
        )
        parts = b.op("split", y, axis=1, sizes=(HEADS * D, G * D, G * D), several=True)
        q, k, v = (b.op("reshape", p, shape=(T, h, D)) for p, h in zip(parts, (HEADS, G, G), strict=True))
        q, k = b.op("rope", q, cos, sin), b.op("rope", k, cos, sin)
        state = b.op("kv_write", states[n], k, v, arg(b, f"slots{n}"), layer=0)
        step = (arg(b, f"table{n}"), arg(b, "lens"), arg(b, "starts"))
        o = b.op("paged_attention", q, state, *step, layer=0, scale=0.25, mask=predicate(mask))
        o = b.op("reshape", o, shape=(T, HEADS * D))
        x = b.op("linear", o, weight(f"{n}.o", H, HEADS * D), None, x)
        y = b.op("layer_norm", x, weight(f"{n}.ln2", H), None, eps=1e-5)
        y = b.op("linear", y, weight(f"{n}.up", 2 * I, H), activation="silu", gated=True)
        x = b.op("linear", y, weight(f"{n}.down", H, I), None, x)
        written.append(state)
    x = b.op("take_rows", x, arg(b, "rows"))
    x = b.op("linear", b.op("rms_norm", x, weight("ln", H), eps=1e-5), weight("embed", V, H))
    logits = b.op("mul", b.op("tanh", b.op("div", x, Scalar(30.0))), Scalar(30.0))
    return b.graph([logits, *written])


@pytest.fixture(scope="module", params=levels())
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(graph(), None, tmp_path_factory.mktemp("forward"), request.param)


A, B = ([int(i) for i in np.random.default_rng(seed).integers(0, V, 60)] for seed in (1, 2))
TABLE_A, TABLE_B = [3, 5, 7, 11], [2, 9, 0, 14]


def test_logits_are_the_interpreters(model: Model) -> None:
    steps = [
        [Chunk(TABLE_A[:3], 0, A[:33]), Chunk(TABLE_B[:2], 0, B[:17])],
        [Chunk(TABLE_A[:3], 33, A[33:34]), Chunk(TABLE_B[:2], 17, B[17:18])],
        [Chunk(TABLE_A, 34, A[34:60])],
    ]
    engine, cache, states = model.open(2), model.cache(BLOCKS), empty_states(model.graph, BLOCKS)
    for chunks in steps:
        got = model.step(engine, cache, chunks)
        want, states = reference_step(model.graph, model.weights, states, chunks)
        assert np.abs(got - want).max() < 1e-5 * want.std()
    model.library.octavo_close(engine)


def test_rows_choose_logits(model: Model) -> None:
    engine, chunk = model.open(2), [Chunk(TABLE_A[:2], 0, A[:20])]
    every = model.step(engine, model.cache(BLOCKS), chunk)
    some = model.step(engine, model.cache(BLOCKS), chunk, rows=[19, 4])
    none = model.step(engine, model.cache(BLOCKS), chunk, rows=[])
    model.library.octavo_close(engine)
    assert np.array_equal(some, every[[19, 4]]) and none.shape == (0, V)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_bits_depend_on_the_request_alone(model: Model, threads: int) -> None:
    engine, cache = model.open(1), model.cache(BLOCKS)
    alone = model.step(engine, cache, [Chunk(TABLE_A, 0, A)])
    model.library.octavo_close(engine)
    engine, cache = model.open(threads), model.cache(BLOCKS)
    got, before = [], 0
    for size in (1, 16, 7, 3, 33):
        other = Chunk(TABLE_B, before, B[before : before + size])
        out = model.step(engine, cache, [other, Chunk(TABLE_A, before, A[before : before + size])])
        got.append(out[size:])
        before += size
    model.library.octavo_close(engine)
    assert np.array_equal(np.concatenate(got), alone)


def test_given_back_blocks_of_a_window_are_not_read(model: Model) -> None:
    engine, cache = model.open(2), model.cache(BLOCKS)
    model.step(engine, cache, [Chunk(TABLE_A, 0, A[:59])])
    want = model.step(engine, [c.copy() for c in cache], [Chunk(TABLE_A, 59, A[59:])])
    bytes_of_block = len(cache[0]) // BLOCKS
    for block in TABLE_A[:2]:  # positions 0..31; the query at 59 reads 40 and above
        cache[0][block * bytes_of_block : (block + 1) * bytes_of_block] = 255
    got = model.step(engine, cache, [Chunk(TABLE_A, 59, A[59:])])
    model.library.octavo_close(engine)
    assert np.array_equal(got, want) and np.isfinite(got).all()


def test_a_fork_continues_from_copied_blocks(model: Model) -> None:
    engine, cache = model.open(2), model.cache(BLOCKS)
    model.step(engine, cache, [Chunk(TABLE_A[:2], 0, A[:20])])
    want = model.step(engine, [c.copy() for c in cache], [Chunk(TABLE_A[:2], 20, A[20:30])])
    pairs = np.array([[TABLE_A[1], 17]], np.int32)
    for group, data in enumerate(cache):
        model.library.octavo_copy_blocks(
            ctypes.c_void_p(engine), group, ctypes.c_void_p(pointer(data)), ctypes.c_void_p(pointer(pairs)), 1
        )
    got = model.step(engine, cache, [Chunk([TABLE_A[0], 17], 20, A[20:30])])
    model.library.octavo_close(engine)
    assert np.array_equal(got, want)


def test_the_callers_rounding_mode_and_denormals_do_not_matter(model: Model) -> None:
    """Denormal weights give denormal results whatever the calling thread's flags are."""
    engine = model.open(1)
    first = model.step(engine, model.cache(BLOCKS), [Chunk(TABLE_A[:2], 0, A[:20])])
    libm = ctypes.CDLL("libm.so.6")
    upward, nearest = 0x800, 0
    if libm.fesetround(upward):
        pytest.fail("the rounding mode could not be changed")
    try:
        second = model.step(engine, model.cache(BLOCKS), [Chunk(TABLE_A[:2], 0, A[:20])])
    finally:
        libm.fesetround(nearest)
        model.library.octavo_close(engine)
    assert np.array_equal(first, second)


def test_the_lowered_graph_is_its_text() -> None:
    lowered = lower(graph())
    assert parse(print_graph(lowered)) == lowered
