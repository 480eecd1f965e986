"""Binaries of linears, built without a device: they fit it, use its matrix units, and copy weights ahead."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from codegen.cache import Cache
from codegen.triton import find_device, generate, toolchain
from codegen.triton.build import BuiltKernel, build_kernels
from codegen.triton.launch import Kernel
from ir.types import DType
from tests.codegen.harness import lower
from tests.triton.test_linear import layers

MODELS = {
    "8B": (4096, 14336, 6144, 128256),
    "600M": (1024, 3072, 4096, 151936),
    "135M": (576, 1536, 960, 49152),
}
CASES = [
    # (target, dtype, model, matrix instructions of tiles of 16 rows, of larger ones)
    ("cuda:sm_80", DType.F32, "135M", "mma", "mma"),
    ("cuda:sm_90", DType.BF16, "8B", "mma", "wgmma"),
    ("cuda:sm_100", DType.BF16, "8B", "mma", "tcgen05"),
    ("hip:gfx942", DType.BF16, "135M", "mfma", "mfma"),
]


def build(
    target: str, model: str, dtype: DType, directory: Path, functions: set[str], *, every: bool = False
) -> list[BuiltKernel]:
    """Of each function the tile of the fewest and that of the most rows and columns, or every one."""
    generated = generate(lower(layers(*MODELS[model], dtype), "gpu"), find_device(target))
    (directory / "kernels").mkdir()
    (directory / "kernels/kernels.py").write_text(generated.source)
    chosen: list[Kernel] = []
    for function in sorted(functions):
        tiles = sorted((k for k in generated.kernels if k.function == function), key=elements)
        chosen += tiles if every else [tiles[0], tiles[-1]]
    return build_kernels(directory, chosen, generated.device, cache=Cache(directory / "cache"))


@pytest.mark.parametrize(
    ("target", "dtype", "tiles"),
    [
        ("cuda:sm_80", DType.BF16, [(16, 32), (64, 32), (128, 64)]),
        ("cuda:sm_100", DType.F32, [(16, 16), (64, 16), (64, 32), (128, 64)]),
    ],
)
def test_no_tile_between_them_spills(
    target: str, dtype: DType, tiles: list[tuple[int, int]], tmp_path: Path
) -> None:
    device, function = find_device(target), "linear_silu_gated"
    built = build(device.target, "600M", dtype, tmp_path, {function}, every=True)
    assert [elements(found.kernel) for found in built] == tiles
    assert [found.spills for found in built] == [0] * len(tiles)
    assert all(found.shared_bytes <= device.shared_bytes for found in built)


def elements(kernel: Kernel) -> tuple[int, int]:
    tile = dict(kernel.constants)
    return int(tile["BLOCK_M"]), int(tile["BLOCK_N"])


@pytest.mark.parametrize(("target", "dtype", "model", "few", "many"), CASES)
def test_tiles_fit_the_device_and_use_its_matrix_units(
    target: str, dtype: DType, model: str, few: str, many: str, tmp_path: Path
) -> None:
    functions = {"linear_residual", "linear_silu_gated"}
    for built in build(target, model, dtype, tmp_path, functions):
        rows, _ = elements(built.kernel)
        assert built.spills == 0, built
        assert built.shared_bytes <= find_device(target).shared_bytes, built
        assert set(built.matrix or {}) == {few if rows == 16 else many}, built


def test_a_decoding_tile_copies_16_bytes_at_a_time_and_several_tiles_ahead(tmp_path: Path) -> None:
    decode = build("cuda:sm_90", "8B", DType.BF16, tmp_path, {"linear"})[0]
    assert elements(decode.kernel)[0] == 16 and decode.file is not None
    command = [toolchain.tool("nvdisasm"), "-c", str(tmp_path / decode.file)]
    sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    copies = re.findall(r"LDGSTS\.(\S+)", sass)
    assert copies and set(copies) == {"E.BYPASS.128"}
    assert not re.search(r"\bLDG\.", sass), "something is loaded through registers"
    waits = [int(n, 16) for n in re.findall(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)", sass)]
    stages = decode.kernel.num_stages
    assert max(waits) == 2 * (stages - 2), "copies of x and w that the loop leaves in flight"
