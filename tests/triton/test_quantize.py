"""Codes of activations, floats of codes, and rows of quantised tables under Triton's interpreter: bit for bit
what the formats say, e4m3 by ml_dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from codegen import triton
from codegen.triton.weights import pack_rows
from ir.build import GraphBuilder
from ir.graph import Graph, Value
from ir.types import DType
from tests.codegen import test_attention as shared
from tests.codegen.harness import Array, Chunk, arg, lower, paged_builder, weight
from tests.triton.harness import TritonModel

VOCAB = 40
I8, F8, U4, U8, BF16, F16, F32 = (
    DType.I8, DType.F8E4M3, DType.U4, DType.U8, DType.BF16, DType.F16, DType.F32,
)  # fmt: skip
# Name: type of codes, group size, type of scales, heads of x (0: none), size of its rows, of what is around.
ROUND_TRIPS = {
    "i8": (I8, 32, F32, 0, 64, 0),
    "i8 odd": (I8, 32, F16, 0, 77, 3),
    "i8 rows": (I8, 0, F32, 0, 101, 0),
    "i8 heads": (I8, 24, BF16, 3, 60, 1),
    "f8": (F8, 0, F32, 0, 64, 0),
    "f8 heads": (F8, 16, F16, 2, 17, 5),
}
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
FINITE = E4M3[np.isfinite(E4M3.astype(np.float32))].astype(np.float32)


def ids(count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(0).integers(0, VOCAB, count)]


def run(model: TritonModel, tokens: list[int]) -> Array:
    return model.step([], [Chunk(list(range(64)), 0, tokens)])


def same(got: Array, want: Array) -> bool:
    return np.array_equal(got.astype(np.float32), want.astype(np.float32), equal_nan=True)


def parts(model: TritonModel, tokens: list[int], widths: dict[str, int]) -> dict[str, Array]:
    ends = np.cumsum([*widths.values()])
    return dict(zip(widths, np.split(run(model, tokens), ends[:-1], axis=1), strict=True))


# --- activations


def round_trip(b: GraphBuilder, name: str, case: Any) -> Value:
    dtype, group, scale, heads, size, around = case
    count = max(1, heads)
    x = b.op("embed", arg(b, "ids"), weight(name, VOCAB, around + count * size + around))
    x = b.op("slice", x, axis=1, start=around, stop=around + count * size) if around else x
    x = b.op("reshape", x, shape=(shared._T, heads, size)) if heads else x
    codes, scales = b.op("quantize", x, several=True, dtype=str(dtype), group_size=group, scale=str(scale))
    out = b.op("dequantize", codes, scales, group_size=group)
    return b.op("reshape", out, shape=(shared._T, heads * size)) if heads else out


def rounded(x: Array, dtype: DType, group: int, scale: DType) -> Array:
    """Rows by way of codes, each step in f32; NaN where an element of the group is not finite."""
    out, most = np.zeros_like(x), np.float32(127 if dtype is I8 else 448)
    for row, to in zip(x, out, strict=True):
        for start in range(0, len(row), group or len(row)):
            part = slice(start, start + group if group else None)
            step = np.float32((np.abs(row[part]).max() / most).astype(scale.numpy))
            if not np.isfinite(step):
                to[part] = np.nan
            elif step != 0:
                scaled = (row[part] * (np.float32(1) / step)).clip(-most, most)
                codes = np.rint(scaled) if dtype is I8 else scaled.astype(ml_dtypes.float8_e4m3fn)
                to[part] = codes.astype(np.float32) * step
    return out


@pytest.fixture(scope="module")
def round_trips(tmp_path_factory: pytest.TempPathFactory) -> TritonModel:
    """Row 0 of each is zeros, and one element each of rows 1 and 2 an infinity and NaN."""
    b, _ = paged_builder()
    out = b.op("concat", *(round_trip(b, n, c) for n, c in ROUND_TRIPS.items()), axis=1)
    graph = b.graph([out])
    rng = np.random.default_rng(1)
    weights = {
        w.name: rng.standard_normal([int(d) for d in w.type.shape]).astype(np.float32)  # type: ignore[union-attr]
        for w in graph.weights
    }
    for x in weights.values():
        x[0], x[1, 20], x[2, 15] = 0, -np.inf, np.nan
    return TritonModel(graph, weights, tmp_path_factory.mktemp("quantize"))


@pytest.mark.parametrize("count", [1, 17])
def test_activations_are_rounded_as_f32_rounds_them(round_trips: TritonModel, count: int) -> None:
    tokens = ([1] if count == 1 else [0, 1, 2]) + ids(count)
    widths = {n: max(1, c[3]) * c[4] for n, c in ROUND_TRIPS.items()}
    for name, got in parts(round_trips, tokens, widths).items():
        dtype, group, scale, heads, size, around = ROUND_TRIPS[name]
        x = round_trips.weights[name][tokens, around : around + widths[name]].reshape(-1, size)
        with np.errstate(invalid="ignore"):
            want = rounded(x, dtype, group, scale).reshape(len(tokens), -1)
        assert same(got, want), (name, heads)


def test_e4m3_codes_are_the_nearest_of_ties_the_even(tmp_path: Path) -> None:
    """Of rows whose largest element is 448, so that nothing is scaled."""
    x = np.concatenate([FINITE, (FINITE[1:] + FINITE[:-1]) / 2, FINITE * np.float32(0.99), [448]])
    x = np.concatenate([x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(500))])
    x = x[np.abs(x) <= 448].astype(np.float32)[None]
    b, _ = paged_builder()
    row = b.op("embed", arg(b, "ids"), weight("x", 1, x.shape[1]))
    codes, scales = b.op("quantize", row, several=True, dtype="f8e4m3", group_size=0, scale="f32")
    graph = b.graph([b.op("dequantize", codes, scales, group_size=0)])
    got = run(TritonModel(graph, {"x": x}, tmp_path), [0])
    assert same(got, x.astype(ml_dtypes.float8_e4m3fn))


# --- tables

# Name: type of codes, group size, zero (a number or a type), whether there are offsets, size of rows, result.
TABLES = {
    "u4": (U4, 32, 8, False, 64, F32),
    "u4 zeros": (U4, 16, U4, False, 33, F32),
    "u4 offsets": (U4, 32, 0, True, 70, BF16),
    "i8 rows": (I8, 0, 0, False, 19, F32),
    "u8": (U8, 16, U8, False, 40, F32),
    "f8": (F8, 128, 0, False, 254, F32),
}


def table(b: GraphBuilder, name: str, case: Any) -> Value:
    dtype, group, zero, offset, size, out = case
    grouped = (VOCAB, -(-size // group) if group else 1)
    found = b.op(
        "qembed", arg(b, "ids"), weight(f"{name}.q", VOCAB, size, dtype=dtype),
        weight(f"{name}.s", *grouped, dtype=F16),
        weight(f"{name}.z", *grouped, dtype=zero) if isinstance(zero, DType) else None,
        weight(f"{name}.o", *grouped, dtype=F16) if offset else None,
        group_size=group, zero=0 if isinstance(zero, DType) else zero, dtype=str(out),
    )  # fmt: skip
    return found if out is F32 else b.op("cast", found, dtype="f32")


def tables(graph: Graph) -> dict[str, Array]:
    """Of e4m3 every row has all numbers."""
    rng, found = np.random.default_rng(2), {}
    for w in graph.weights:
        shape = tuple(int(d) for d in w.type.shape)  # type: ignore[union-attr]
        dtype = w.type.dtype  # type: ignore[union-attr]
        if dtype is F8:
            found[w.name] = np.tile(FINITE, (VOCAB, 1)).astype(dtype.numpy)
        elif dtype.is_float:
            found[w.name] = rng.uniform(-1, 1, shape).astype(dtype.numpy)
        else:
            low, high = {U4: (0, 16), U8: (0, 256), I8: (-127, 128)}[dtype]
            found[w.name] = rng.integers(low, high, shape).astype(dtype.numpy)
    return found


def test_rows_of_tables_are_those_of_their_floats(tmp_path: Path) -> None:
    b, _ = paged_builder()
    graph = b.graph([b.op("concat", *(table(b, n, c) for n, c in TABLES.items()), axis=1)])
    model = TritonModel(graph, tables(graph), tmp_path)
    tokens = [*ids(17), -1, VOCAB]
    for name, got in parts(model, tokens, {n: c[4] for n, c in TABLES.items()}).items():
        _, group, zero, offset, size, out = TABLES[name]
        q, s, *_ = (model.weights[f"{name}.{part}"] for part in "qs")
        z, o = (model.weights.get(f"{name}.{part}") for part in "zo")
        spread = lambda a: np.repeat(a.astype(np.float32), group or size, 1)[:, :size]  # noqa: B023, E731
        want = q.astype(np.float32) - (spread(z) if z is not None else np.float32(0 if z else zero))
        want = want * spread(s) + (spread(o) if offset else np.float32(0))
        assert same(got[:-2], want[tokens[:-2]].astype(out.numpy)), name
        assert np.isnan(got[-2:]).all()


def test_a_table_that_a_linear_reads_too_is_kept_once(tmp_path: Path) -> None:
    b, _ = paged_builder()
    q, s = weight("q", VOCAB, 32, dtype=U4), weight("s", VOCAB, 1, dtype=F16)
    row = b.op("qembed", arg(b, "ids"), q, s, group_size=32, zero=8)
    graph = b.graph([b.op("qlinear", row, q, s, group_size=32, zero=8)])
    generated = triton.generate(lower(graph, "gpu"), triton.find_device("cuda:sm_90"))
    assert [(w.name, w.bytes) for w in generated.weights] == [("q.codes", VOCAB * 16), ("s", VOCAB * 2)]


@pytest.mark.parametrize("size", [1, 15, 16, 17, 32, 37])
def test_packed_rows_hold_neighbours_in_a_byte_and_end_in_zeros(size: int) -> None:
    codes = np.random.default_rng(size).integers(1, 16, (5, size)).astype(np.uint8)
    packed = pack_rows(codes, U4)
    assert packed.dtype == np.uint8 and packed.shape[1] % 16 == 0
    for row, held in zip(codes, packed, strict=True):
        unpacked = [half for byte in held.tolist() for half in (byte & 15, byte >> 4)]
        assert unpacked == row.tolist() + [0] * (len(unpacked) - size)
    for dtype in (I8, F8):
        floats = codes.astype(np.float32).astype(dtype.numpy)
        packed = pack_rows(floats, dtype)
        assert packed.shape == (5, -(-size // 16) * 16) and not packed[:, size:].any()
        assert np.array_equal(packed[:, :size].view(np.uint8), floats.view(np.uint8))
