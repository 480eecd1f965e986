"""Binaries of attention, built without a device: no spills, within shared memory, on the matrix units."""

from __future__ import annotations

from pathlib import Path

import pytest

from codegen import triton
from codegen.cache import Cache
from codegen.triton import find_device
from codegen.triton.attention_tiles import attention_tiles
from codegen.triton.build import build_kernels
from codegen.triton.devices import DEVICES
from ir.types import DType
from tests.codegen.harness import lower
from tests.codegen.test_attention import Case
from tests.triton.test_attention import graph

# Target, query heads for 8 key/value heads, head size, the matrix instructions of prefill and of decode.
BUILT = [
    ("cuda:sm_80", 24, 64, "mma", "mma"),
    ("cuda:sm_90", 32, 128, "wgmma", "mma"),
    ("cuda:sm_100", 8, 64, "tcgen05", "mma"),
    ("hip:gfx942", 32, 64, "mfma", "mfma"),
]


@pytest.mark.parametrize("distances", [0, 113], ids=["plain", "distances"])
@pytest.mark.parametrize(("target", "heads", "size", "prefill", "decode"), BUILT, ids=[b[0] for b in BUILT])
def test_kernels_fit_and_multiply_on_the_matrix_units(
    tmp_path: Path, target: str, heads: int, size: int, prefill: str, decode: str, distances: int
) -> None:
    device = find_device(target)
    case = Case(heads, 8, size, dtype=DType.BF16, distances=distances)
    generated = triton.generate(lower(graph(case, context=131072), "gpu"), device)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "kernels.py").write_text(generated.source)
    kernels = [k for k in generated.kernels if k.function.startswith("attention")]
    built = {
        b.kernel.function: b
        for b in build_kernels(tmp_path, kernels, device, cache=Cache(tmp_path / "cache"))
    }
    assert set(built) == {"attention_prefill", "attention_decode", "attention_combine"}
    for kernel in built.values():
        assert kernel.spills == 0 and kernel.shared_bytes <= device.shared_bytes
    assert (built["attention_prefill"].matrix or {}).get(prefill)
    assert (built["attention_decode"].matrix or {}).get(decode)


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.target)
def test_every_head_has_tiles_with_rows_for_the_matrix_units(device: triton.Device) -> None:
    for width in (16, 32, 64, 128, 256, 512):
        for element_bytes in (2, 4):
            for tile in attention_tiles(device, width, element_bytes):
                assert tile.rows >= 16 and tile.keys % 16 == 0
