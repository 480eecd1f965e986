"""What a kernel takes of a device: read from its binary or assembly, and the occupancy that follows."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from codegen.triton import toolchain
from codegen.triton.devices import Device

# Instructions of the matrix units, by what they are called in the vendors' instruction sets: SASS's HGMMA is
# PTX's wgmma, its UTCHMMA is tcgen05.mma, its HMMA is mma.sync.
MATRIX: dict[str, str] = {
    "wgmma": r"\b[HQIB]GMMA\b",
    "tcgen05": r"\bUTC[A-Z]*MMA\b",
    "mma": r"\b[HQIDBO]MMA\b",
    "mfma": r"\bv_s?mfma\w*",
    "wmma": r"\bv_s?wmma\w*",
}


@dataclass(frozen=True)
class Resources:
    """registers: of 32 bits, per thread. spills: bytes per thread that do not fit them and lie in memory.

    matrix: how often each kind of matrix instruction stands in the code (not how often it runs).
    """

    registers: int
    spills: int
    matrix: dict[str, int] = field(default_factory=dict[str, int])


def of_cubin(cubin: bytes, symbol: str) -> Resources:
    """By the tools that come with Triton; they need no device."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        usage = _run("cuobjdump", "-res-usage", str(path))
        return of_nvidia(usage, _run("nvdisasm", "-c", str(path)), symbol)


def of_nvidia(usage: str, sass: str, symbol: str) -> Resources:
    """usage: what `cuobjdump -res-usage` prints. Raises ValueError where it lacks the function."""
    found = re.search(rf"Function {re.escape(symbol)}:\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    if found is None:
        raise ValueError(f"cuobjdump says nothing of {symbol}:\n{usage}")
    registers, stack, local = map(int, found.groups())
    return Resources(registers, stack + local, count_matrix(sass))


def of_amdgcn(assembly: str) -> Resources:
    """From the metadata at its end; from gfx90a on .vgpr_count has the accumulators among them."""
    number = {name: int(value) for name, value in re.findall(r"\.(\w+):\s+(\d+)\s*$", assembly, re.MULTILINE)}
    spilled = max(4 * number.get("vgpr_spill_count", 0), number.get("private_segment_fixed_size", 0))
    return Resources(number["vgpr_count"], spilled, count_matrix(assembly))


def count_matrix(assembly: str) -> dict[str, int]:
    """Kinds that occur, and how often."""
    counts = Counter({kind: len(re.findall(pattern, assembly)) for kind, pattern in MATRIX.items()})
    return {kind: n for kind, n in counts.items() if n}


def occupancy(device: Device, num_warps: int, registers: int, shared_bytes: int) -> float:
    """Warps that an SM holds at once, of those it could: blocks of this kernel until something runs out."""
    return blocks_per_sm(device, num_warps, registers, shared_bytes) * num_warps / device.warps_per_sm


def blocks_per_sm(device: Device, num_warps: int, registers: int, shared_bytes: int) -> int:
    """The least of what warps, registers, shared memory and the limit on blocks allow.

    NVIDIA, compute capability 8 and newer (CUDA programming guide, "Compute Capabilities"): a warp takes its
    threads' registers, rounded up to a multiple of 256; an SM's four partitions hold whole warps; a block
    takes its shared memory rounded up to 128 bytes and 1 KiB that the system keeps for itself.

    AMD CDNA: a SIMD's 512 registers per lane go to wavefronts in multiples of 8, at most 8 of them; a CU has
    four; a block takes its LDS rounded up to 512 bytes.
    """
    if device.backend == "hip":
        per_simd = device.registers_per_sm // (device.warp_size * 4)
        warps = 4 * min(device.warps_per_sm // 4, per_simd // _up(max(registers, 1), 8))
        shared, reserved = _up(shared_bytes, 512), 0
    else:
        per_partition = device.registers_per_sm // 4 // _up(max(registers, 1) * device.warp_size, 256)
        warps = min(device.warps_per_sm, 4 * per_partition)
        shared, reserved = _up(shared_bytes, 128), 1024
    by_shared = device.shared_bytes_per_sm // max(1, shared + reserved)
    return min(warps // num_warps, by_shared, device.blocks_per_sm)


def _up(n: int, step: int) -> int:
    return -(-n // step) * step


def _run(tool: str, *args: str) -> str:
    return subprocess.run([toolchain.tool(tool), *args], capture_output=True, text=True, check=True).stdout
