"""What the GPUs are that kernels are built for: limits that tiles must fit, and rates that bounds come from.

Rates are the vendors' published peaks without sparsity.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace


class UnknownTarget(ValueError):
    """Not the name of a GPU target; the message lists those there are."""


@dataclass(frozen=True)
class Device:
    """One GPU architecture. An SM is what AMD calls a compute unit, a warp its wavefront.

    shared_bytes: the most one block may use. dot_f32: how `tl.dot` multiplies f32 factors.
    """

    target: str  # as --target spells it
    backend: str  # "cuda", "hip" or "interpret"
    arch: str
    model: str
    warp_size: int
    num_sms: int
    shared_bytes: int
    shared_bytes_per_sm: int
    registers_per_sm: int
    warps_per_sm: int
    blocks_per_sm: int
    read_bytes_per_s: float
    bf16_ops_per_s: float
    f32_ops_per_s: float
    dot_f32: str = "tf32x3"

    @property
    def folder(self) -> str:
        """The target's name as a file name."""
        return self.target.replace(":", "-")

    @property
    def interpreted(self) -> bool:
        return self.backend == "interpret"


KIB = 1024
DEVICES: tuple[Device, ...] = (
    Device("cuda:sm_80", "cuda", "sm_80", "A100 SXM", 32, 108, 163 * KIB, 164 * KIB, 65536, 64, 32,
           2.04e12, 312e12, 156e12),
    Device("cuda:sm_90", "cuda", "sm_90", "H100 SXM", 32, 132, 227 * KIB, 228 * KIB, 65536, 64, 32,
           3.35e12, 989e12, 494e12),
    Device("cuda:sm_100", "cuda", "sm_100", "B200", 32, 148, 227 * KIB, 228 * KIB, 65536, 64, 32,
           8.0e12, 2250e12, 1100e12),
    Device("hip:gfx942", "hip", "gfx942", "MI300X", 64, 304, 64 * KIB, 64 * KIB, 131072, 32, 16,
           5.3e12, 1307e12, 163e12, "ieee"),
    Device("triton-interpret", "interpret", "interpret", "numpy", 32, 1, 1 << 30, 1 << 30, 1 << 30, 1, 1,
           1e10, 1e11, 1e11, "ieee"),
)  # fmt: skip
# Where other devices differ from the nearest one in DEVICES: KiB of shared memory of a block and of an SM,
# and warps of an SM (CUDA programming guide, "Compute Capabilities"; AMD's ISA guides).
DIFFERENT: dict[str, tuple[int, int, int]] = {
    "sm_86": (99, 100, 48), "sm_89": (99, 100, 48), "sm_120": (99, 100, 48), "sm_121": (99, 100, 48),
    "gfx90a": (64, 64, 32), "gfx950": (160, 160, 32),
}  # fmt: skip
OLDEST = 80


def find_device(target: str) -> Device:
    """Raises UnknownTarget."""
    for device in DEVICES:
        if device.target == target:
            return device
    raise UnknownTarget(f"there is no target {target!r}; there are {', '.join(d.target for d in DEVICES)}")


def derived_device(target: str) -> Device:
    """The device of a target, or the nearest older one with the limits that differ. Raises UnknownTarget."""
    for device in DEVICES:
        if device.target == target and not device.interpreted:
            return device
    found = re.fullmatch(r"cuda:(sm_(\d+))|hip:(gfx9[0-9a-f]+)", target)
    if found is None or (found[2] and int(found[2]) < OLDEST):
        raise UnknownTarget(f"{target}: kernels are built for cuda:sm_{OLDEST} and newer, and for hip:gfx9")
    nearest, arch = _nearest(found[2]), found[1] or found[3]
    block, sm, warps = DIFFERENT.get(
        arch, (nearest.shared_bytes // KIB, nearest.shared_bytes_per_sm // KIB, nearest.warps_per_sm)
    )
    return replace(nearest, target=target, arch=arch, model=arch, shared_bytes=block * KIB,
                   shared_bytes_per_sm=sm * KIB, warps_per_sm=warps)  # fmt: skip


def _nearest(capability: str | None) -> Device:
    if capability is None:
        return next(d for d in DEVICES if d.backend == "hip")
    older = [d for d in DEVICES if d.backend == "cuda" and int(d.arch[3:]) <= int(capability)]
    return max(older, key=lambda d: int(d.arch[3:]))
