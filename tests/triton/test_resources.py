"""Registers, spills and matrix instructions from what the tools print, and occupancy worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from codegen.costs import Cost
from codegen.triton import find_device
from codegen.triton.costs import bound
from codegen.triton.resources import Resources, occupancy, of_amdgcn, of_nvidia

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function other:
  REG:12 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:400 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function matmul:
  REG:255 STACK:24 SHARED:1024 LOCAL:8 CONSTANT[0]:576 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SASS = """
        /*0010*/  HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0020*/  QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4], R24 ;
        /*0030*/  HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0040*/  UTCHMMA gdesc[UR4], gdesc[UR6], tmem[UR8], tmem[UR10], idesc[UR11], UPT ;
        /*0050*/  FFMA R4, R4, R5, R6 ;
"""
ASSEMBLY = """
	v_mfma_f32_32x32x8_bf16 a[0:15], v[2:3], v[4:5], a[0:15]
	v_mfma_f32_32x32x8_bf16 a[0:15], v[6:7], v[8:9], a[0:15]
	.amdgpu_metadata
amdhsa.kernels:
  - .agpr_count:     64
    .private_segment_fixed_size: 16
    .sgpr_count:     22
    .vgpr_count:     264
    .vgpr_spill_count: 5
    .wavefront_size: 64
"""


def test_of_cubins() -> None:
    matrix = {"wgmma": 2, "tcgen05": 1, "mma": 1}
    assert of_nvidia(USAGE, SASS, "matmul") == Resources(255, 32, matrix)
    assert of_nvidia(USAGE, "FFMA R4, R4, R5, R6 ;", "other") == Resources(12, 0, {})
    with pytest.raises(ValueError, match="says nothing of third"):
        of_nvidia(USAGE, SASS, "third")


def test_of_amdgcn() -> None:
    assert of_amdgcn(ASSEMBLY) == Resources(264, 20, {"mfma": 2})


@pytest.mark.parametrize(
    ("target", "num_warps", "registers", "shared_bytes", "warps", "of"),
    [
        ("cuda:sm_90", 4, 32, 0, 64, 64),  # 64 warps and 16 blocks
        ("cuda:sm_90", 4, 40, 0, 48, 64),  # 1280 registers a warp: 12 fit the 16384 of a partition
        ("cuda:sm_90", 4, 64, 100 * 1024, 8, 64),  # 101 KiB with the system's: 2 blocks in 228
        ("cuda:sm_90", 8, 255, 192 * 1024, 8, 64),  # 8192 registers a warp: 2 in a partition
        ("cuda:sm_90", 4, 33, 8 * 1024, 48, 64),  # rounded up to 40 a thread: a multiple of 256 a warp
        ("cuda:sm_80", 1, 16, 0, 32, 64),  # 32 blocks are the most
        ("cuda:sm_80", 4, 128, 65536, 8, 64),  # 65 KiB of 164: 2 blocks
        ("hip:gfx942", 8, 101, 0, 16, 32),  # 104 of 512 a lane: 4 wavefronts on each of 4 SIMDs
        ("hip:gfx942", 8, 101, 64 * 1024, 8, 32),  # the whole LDS
        ("hip:gfx942", 4, 264, 0, 4, 32),  # more than half of the registers
        ("hip:gfx942", 4, 16, 0, 32, 32),
    ],
)
def test_occupancy(
    target: str, num_warps: int, registers: int, shared_bytes: int, warps: int, of: int
) -> None:
    assert occupancy(find_device(target), num_warps, registers, shared_bytes) == warps / of


def test_bounds_are_the_slower_of_reading_and_multiplying() -> None:
    device = find_device("cuda:sm_90")  # 3.35 TB/s, 989 Top/s in bf16, 494 in tf32
    assert bound(Cost(weight_bytes=3_000_000, kv_bytes=300_000, activation_bytes=50_000), device) == (
        "read", pytest.approx(1e-6),
    )  # fmt: skip
    products = Cost(weight_bytes=1, operations=989_000_000)
    assert bound(replace(products, dtype="bf16"), device) == ("bf16", pytest.approx(1e-6))
    assert bound(products, device) == ("f32", pytest.approx(989 / 494 * 3e-6))  # three of tf32 each
    assert bound(products, find_device("hip:gfx942")) == ("f32", pytest.approx(989 / 163 * 1e-6))
