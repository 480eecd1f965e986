"""What the GPUs are that kernels are built for: limits that tiles must fit, and rates that bounds come from.

Rates are the vendors' published peaks without sparsity.
"""

from __future__ import annotations

from dataclasses import dataclass


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


def find_device(target: str) -> Device:
    """Raises UnknownTarget."""
    for device in DEVICES:
        if device.target == target:
            return device
    raise UnknownTarget(f"there is no target {target!r}. There are {', '.join(d.target for d in DEVICES)}")
