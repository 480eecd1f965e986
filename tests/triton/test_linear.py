"""linear under Triton's interpreter against the reference in float64, with every epilogue and odd sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from codegen.triton import DEVICES, generate
from codegen.triton.devices import Device
from codegen.triton.tiles import LinearTile, linear_tiles
from ir.graph import Graph, Value
from ir.ops.pointwise import ACTIVATIONS
from ir.types import DType
from tests.codegen import test_linear as cpu
from tests.codegen.harness import Chunk, arg, lower, paged_builder, reference_step, weight
from tests.triton.harness import TritonModel

VOCAB = 64
F32_ERROR = 1e-5
BF16_ERROR = 2.0**-8  # half a unit in the last place of a result of up to 1 that is stored as bf16


def run(model: TritonModel, tokens: list[int]) -> np.ndarray:
    return model.step([], [Chunk(list(range(64)), 0, tokens)])


def reference(model: TritonModel, tokens: list[int]) -> np.ndarray:
    return reference_step(model.graph, model.weights, [], [Chunk(list(range(64)), 0, tokens)])[0]


@pytest.fixture(scope="module")
def every_epilogue(tmp_path_factory: pytest.TempPathFactory) -> TritonModel:
    return TritonModel(cpu.graph(), None, tmp_path_factory.mktemp("linear"))


@pytest.mark.parametrize("count", [1, 15, 16, 17, 70])
def test_every_epilogue_is_close_to_float64(every_epilogue: TritonModel, count: int) -> None:
    tokens = cpu.ids(count)
    got, want = run(every_epilogue, tokens), reference(every_epilogue, tokens)
    start = 0
    for name, (_, n, _, _, _, _, gated) in cpu.CASES.items():
        part = slice(start, start + (n // 2 if gated else n))
        assert np.abs(got[:, part] - want[:, part]).max() / want[:, part].std() < F32_ERROR, name
        start = part.stop


@dataclass(frozen=True)
class Case:
    """x is a view of rows that are `before` + k + `after` wide."""

    n: int
    k: int
    x: DType
    w: DType
    out: DType
    residual: DType | None
    bias: bool
    gated: bool
    activation: str
    before: int
    after: int


FLOATS = st.sampled_from([DType.F32, DType.BF16])
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([16, 32, 48, 64]))
CASES = st.builds(
    Case, n=SIZES, k=SIZES, x=FLOATS, w=st.sampled_from([DType.F32, DType.BF16, DType.F16]), out=FLOATS,
    residual=st.one_of(st.none(), FLOATS), bias=st.booleans(), gated=st.booleans(),
    activation=st.sampled_from(sorted(ACTIVATIONS)), before=st.sampled_from([0, 0, 1, 16]),
    after=st.sampled_from([0, 3, 16]),
)  # fmt: skip
TILE = st.builds(
    LinearTile, m=st.sampled_from([16, 32]), n=st.sampled_from([16, 32]), k=st.sampled_from([16, 32]),
    num_warps=st.just(1), num_stages=st.just(1), parts=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 2, 8]), clamped=st.booleans(),
)  # fmt: skip


def graph(case: Case) -> Graph:
    b, _ = paged_builder()
    wide = b.op("embed", arg(b, "ids"), weight("x", VOCAB, case.before + case.k + case.after))
    wide = wide if case.x is DType.F32 else b.op("cast", wide, dtype="bf16")
    x = wide
    if case.before or case.after:
        stop = case.before + case.k
        x = b.op("slice", wide, axis=1, start=case.before, stop=stop)
    residual = None
    if case.residual is not None:
        residual = b.op("embed", arg(b, "ids"), weight("r", VOCAB, case.n))
        residual = b.op("cast", residual, dtype=str(case.residual))
    rows = case.n * (2 if case.gated else 1)
    out = b.op(
        "linear", x, weight("w", rows, case.k, dtype=case.w), weight("b", rows) if case.bias else None,
        residual, activation=case.activation, gated=case.gated, dtype=str(case.out),
    )  # fmt: skip
    return b.graph([b.op("cast", out, dtype="f32")])


def layers(hidden: int, ffn: int, qkv: int, vocab: int, dtype: DType) -> Graph:
    """The linears of a decoder layer and the head, with the types that they have in a model of `dtype`."""
    b, _ = paged_builder()
    residual = b.op("embed", arg(b, "ids"), weight("r", VOCAB, hidden))

    def linear(name: str, n: int, k: int, added: Value | None = None, **attrs: Any) -> Value:
        x = b.op("embed", arg(b, "ids"), weight(f"{name}.x", VOCAB, k))
        x = x if dtype is DType.F32 else b.op("cast", x, dtype="bf16")
        return b.op("linear", x, weight(name, n, k, dtype=dtype), None, added, **{"dtype": "f32", **attrs})

    results = [linear("qkv", qkv, hidden), linear("o", hidden, hidden, residual)]
    mlp = linear("gate_up", 2 * ffn, hidden, gated=True, activation="silu", dtype=str(dtype))
    results += [b.op("cast", mlp, dtype="f32"), linear("down", hidden, ffn, residual)]
    return b.graph([b.op("concat", *results, linear("head", vocab, hidden), axis=1)])


def with_tile(tile: LinearTile, graph: Graph, directory: Path) -> TritonModel:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("codegen.triton.linear.linear_tiles", lambda *_, **__: [(None, tile)])
        return TritonModel(graph, None, directory)


@given(case=CASES, tile=TILE, count=st.one_of(st.integers(1, 70), st.sampled_from([1, 15, 16, 17])))
@settings(max_examples=25, deadline=None)
def test_any_tile_on_any_sizes_is_close_to_float64(case: Case, tile: LinearTile, count: int) -> None:
    with TemporaryDirectory() as directory:
        model = with_tile(tile, graph(case), Path(directory))
        tokens = cpu.ids(count)
        got, want = run(model, tokens), reference(model, tokens)
    error = F32_ERROR if case.out is DType.F32 else BF16_ERROR
    np.testing.assert_allclose(got, want, rtol=error, atol=error * max(np.abs(want).max(), 1e-2))


def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(tmp_path: Path) -> None:
    case = Case(41, 37, DType.BF16, DType.BF16, DType.F32, DType.F32, True, True, "silu", 0, 3)
    model = TritonModel(graph(case), None, tmp_path, invariant=True)
    tokens = cpu.ids(17)
    together = run(model, tokens)
    for start, size in [(0, 1), (5, 1), (16, 1), (3, 2), (1, 15)]:
        part = run(model, tokens[start : start + size])
        assert np.array_equal(part, together[start : start + size]), (start, size)


GPUS = [device for device in DEVICES if not device.interpreted]


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.target)
@given(n=st.integers(1, 200_000), k=st.integers(1, 20_000), gated=st.booleans(), wide=st.booleans())
@settings(max_examples=50, deadline=None)
def test_a_step_of_any_size_has_a_tile(device: Device, n: int, k: int, gated: bool, wide: bool) -> None:
    tiles = linear_tiles(device, n, k, gated=gated, wide=wide)
    bounds = [most for most, _ in tiles]
    assert bounds[-1] is None and bounds[:-1] == sorted({most for most in bounds if most is not None})
    for _, tile in tiles:
        assert all(size & (size - 1) == 0 for size in (tile.m, tile.n, tile.k))
    assert len(linear_tiles(device, n, k, gated=gated, wide=wide, invariant=True)) == 1


@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.target)
@pytest.mark.parametrize("wide", [False, True])
def test_a_decoding_steps_programs_fill_half_the_sms_and_keep_the_rate_times_latency_in_flight(
    device: Device, wide: bool
) -> None:
    """At an 8B model's layers: rate by 0.8 us of latency, by the bytes of weights that a program awaits."""
    for n, k, gated in [(6144, 4096, False), (4096, 4096, False), (14336, 4096, True), (4096, 14336, False)]:
        tile = linear_tiles(device, n, k, gated=gated, wide=wide)[0][1]
        programs = -(-n // tile.n)
        assert tile.m == 16 and programs >= device.num_sms / 2
        ahead = max(1, tile.num_stages - 2) * tile.n * (2 if gated else 1) * tile.k * (4 if wide else 2)
        assert min(programs, 2 * device.num_sms) * ahead > 0.8 * 0.8e-6 * device.read_bytes_per_s, (n, k)


@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.target)
def test_layers_of_one_model_share_binaries(device: Device, dtype: DType, tmp_path: Path) -> None:
    kernels = generate(lower(layers(4096, 14336, 6144, 128256, dtype), "gpu"), device).kernels
    assert len([k for k in kernels if k.function.startswith("linear")]) < 20
