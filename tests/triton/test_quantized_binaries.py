"""Binaries of kernels of quantised weights and caches, built without a device: no spills, within shared
memory, on the matrix units. A kind of kernel is built for one or two of the targets."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen.cache import Cache
from codegen.triton import Device, find_device, generate
from codegen.triton.build import BuiltKernel, build_kernels
from codegen.triton.devices import DEVICES
from codegen.triton.launch import Kernel
from codegen.triton.qlinear_tiles import TILES
from ir.graph import Graph
from ir.types import DType
from tests.codegen.harness import lower
from tests.triton import test_kv_attention as kv
from tests.triton import test_qlinear as linears

U4, I8, F8, BF16 = DType.U4, DType.I8, DType.F8E4M3, DType.BF16
GPUS = [device for device in DEVICES if not device.interpreted]
N, K = 2048, 1024
LINEARS = {
    "u4": linears.Case(N, K, U4, 32, 8, x=BF16, residual=True),
    "u4 gated": linears.Case(N, K, U4, 64, offset=True, x=BF16, out=BF16, gated=True, activation="silu"),
    "i8 by u4": linears.Case(N, K, U4, 32, U4, x_dtype=I8, x=BF16),
    "f8 by f8": linears.Case(N, K, F8, 0, x_dtype=F8, x_group=0, x=BF16),
}
CACHES = {
    "i8": kv.Case((I8, False), (I8, False), 24, 8, 64, block=16),
    "f8": kv.Case((F8, False), (F8, False), 24, 8, 64, block=16),
    "u4": kv.Case((U4, True), (U4, False), 24, 8, 64, block=64),
}
# Target, linear and the matrix instructions of its tiles of few and of many rows, cache, kernels and theirs.
BUILT = [
    ("cuda:sm_80", "i8 by u4", ("mma", "mma"), "f8", {"kv_write_codes": "", "attention_decode": "mma"}),
    ("cuda:sm_90", "f8 by f8", ("mma", "wgmma"), "i8", {"attention_prefill": "wgmma"}),
    ("cuda:sm_100", "u4 gated", ("mma", "tcgen05"), "u4", {"kv_seal": "", "attention_decode": "mma"}),
    ("hip:gfx942", "u4", ("mfma", "mfma"), "u4", {"kv_seal": "", "attention_decode": "mfma"}),
]


def build(graph: Graph, device: Device, directory: Path, functions: set[str]) -> list[BuiltKernel]:
    """Of each function the tile of the fewest and that of the most rows."""
    generated = generate(lower(graph, "gpu"), device)
    (directory / "kernels").mkdir(parents=True)
    (directory / "kernels/kernels.py").write_text(generated.source)
    chosen: dict[Kernel, None] = {}
    for function in sorted(functions):
        tiles = sorted((k for k in generated.kernels if k.function.startswith(function)), key=rows)
        chosen |= dict.fromkeys((tiles[0], tiles[-1]))
    found = build_kernels(directory, [*chosen], device, cache=Cache(directory / "cache"))
    for built in found:
        assert built.spills == 0, built
        assert built.shared_bytes <= device.shared_bytes, built
    return found


def rows(kernel: Kernel) -> int:
    return int(dict(kernel.constants).get("BLOCK_M", 0))


@pytest.mark.parametrize(
    ("target", "linear", "units"), [(b[0], b[1], b[2]) for b in BUILT], ids=[b[0] for b in BUILT]
)
def test_linears_fit_and_multiply_on_the_matrix_units(
    tmp_path: Path, target: str, linear: str, units: tuple[str, str]
) -> None:
    graph = linears.graph({linear: LINEARS[linear]})
    few, many = build(graph, find_device(target), tmp_path, {"qlinear"})
    assert rows(few.kernel) == 16 and rows(many.kernel) >= 64
    assert (set(few.matrix or {}), set(many.matrix or {})) == ({units[0]}, {units[1]})


@pytest.mark.parametrize(
    ("target", "cache", "functions"), [(b[0], b[3], b[4]) for b in BUILT], ids=[b[0] for b in BUILT]
)
def test_kernels_of_caches_fit_and_multiply_on_the_matrix_units(
    tmp_path: Path, target: str, cache: str, functions: dict[str, str]
) -> None:
    graph = kv.graph({cache: CACHES[cache]}, 131072)
    for built in build(graph, find_device(target), tmp_path, set(functions)):
        unit = functions[built.kernel.function]
        assert not unit or (built.matrix or {}).get(unit), built


@pytest.mark.parametrize("device", GPUS, ids=lambda d: d.target)
@pytest.mark.parametrize("name", LINEARS)
def test_every_linear_has_tiles_for_few_and_for_many_rows(device: Device, name: str) -> None:
    kernels = generate(lower(linears.graph({name: LINEARS[name]}), "gpu"), device).kernels
    tiles = {rows(k) for k in kernels if k.function.startswith("qlinear")}
    assert min(tiles) == 16 and max(tiles) >= 64
    for kernel in kernels:
        assert all(v & (v - 1) == 0 for n, v in kernel.constants if n.startswith("BLOCK"))  # type: ignore[operator]


def test_tiles_are_told_apart_as_linears_are() -> None:
    """A tile of 16 rows is for decoding, and any other is taken from 64 rows on."""
    for tiles in TILES.values():
        assert {t.m == 16 for t in tiles} == {False, True} and all(t.m in (16, 64, 128) for t in tiles)
