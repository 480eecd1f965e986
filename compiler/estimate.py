"""What a compile will take: bytes to write, memory, and time.

Memory is a bound measured on the demo model (tests/model/test_compile.py), time rests on the compiles that
ran on this machine before.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence

from compiler.rates import Rates
from compiler.survey import Survey

MOST_SLOWDOWN = 2.5  # beyond it, how long a compile takes depends on the others alone
SIZES = {"f32": 4, "bf16": 2}  # bytes of a weight
KERNEL_BYTES = 2_000_000  # of an ISA level's library, or of a GPU's kernels, with their source
OBJECTS = 2  # C++ files that are built for each ISA level
IMPORT_BYTES = 400_000_000  # torch and transformers
WORK_BYTES = 300 << 20  # beyond them and the largest tensor
BUILDER_BYTES = {"cpu": 270_000_000}  # of a C++ compiler
GPU_BUILDER_BYTES = 500_000_000  # of a process of Triton's

Levels = Mapping[str, Sequence[str]]  # of each target its ISA levels


def write_bytes(survey: Survey, targets: Levels, num_kinds: int, weight_bytes: float) -> int:
    """num_kinds: of targets that share a file of weights. weight_bytes: of one weight."""
    variants = sum(max(1, len(levels)) for levels in targets.values())
    return round(survey.num_weights * weight_bytes * num_kinds) + variants * KERNEL_BYTES


def memory_bytes(survey: Survey, targets: Levels) -> int:
    """At the import's peak, or while compilers run beside what the import left."""
    largest = max(survey.counts, default=0) * 4
    jobs = max(OBJECTS * len(levels) or 16 for levels in targets.values())
    each = max(BUILDER_BYTES.get(name, GPU_BUILDER_BYTES) for name in targets)
    return IMPORT_BYTES + WORK_BYTES + max(largest, min(num_cores(), jobs) * each)


def seconds(
    survey: Survey,
    targets: Levels,
    dtype: str,
    num_bytes: int,
    rates: Rates,
    built: bool,
) -> float | None:
    """With the load that the machine has now. None where a part of it was never measured, or it is too busy.

    num_bytes: to write. built: whether all kernels are, or none, as all are in the cache.
    """
    each = rates.build_s if built else rates.link_s
    kernels = sum(each.get(name, math.nan) * (OBJECTS * len(levels) or 1) for name, levels in targets.items())
    packing = num_bytes * rates.pack_s.get(f"{survey.kind}, {dtype}", math.nan)
    alone = rates.importing(len(survey.counts)) + packing + rates.verify_s
    found = alone * slowdown(1) + (num_bytes * rates.hash_s + kernels) / num_cores() * slowdown(num_cores())
    is_known = survey.counts and slowdown(1) <= MOST_SLOWDOWN and not math.isnan(found)
    return found if is_known else None


def num_cores() -> int:
    return len(os.sched_getaffinity(0))


def slowdown(threads: int) -> float:
    """How much longer as many threads take beside what ran in the last minute."""
    return max(1.0, (load() + threads) / max(num_cores(), threads))


def load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0
