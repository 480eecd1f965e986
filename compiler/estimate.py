"""What a compile will read, write and take, said before anything that takes long.

Sizes come from the checkpoint's headers, memory from a bound measured on the demo model
(tests/model/test_compile.py), time from the compiles that ran on this machine before.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from codegen.scratch import PREFIX
from compiler.errors import CompileError
from compiler.rates import Rates
from compiler.survey import Survey

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
LOCKED = (errno.EROFS, errno.EACCES, errno.EPERM)
MOST_SLOWDOWN = 2.5  # beyond it, how long a compile takes depends on the others alone
TEMPORARY_BYTES = 50_000_000  # of what compilers keep while they run
SIZES = {"f32": 4, "bf16": 2}  # bytes of a weight
KINDS = {"huggingface": "Hugging Face directory", "gguf": "GGUF file", "module": "module in memory",
         "shapes": "shapes alone", "unknown": "format not known before the import"}  # fmt: skip
KERNEL_BYTES = 2_000_000  # of an ISA level's library, or of a GPU's kernels, with their source
OBJECTS = 2  # C++ files that are built for each ISA level
IMPORT_BYTES = 400_000_000  # torch and transformers
WORK_BYTES = 300 << 20  # beyond them and the largest tensor
BUILDER_BYTES = {"cpu": 270_000_000}  # of a C++ compiler
GPU_BUILDER_BYTES = 500_000_000  # of a process of Triton's


@dataclass(frozen=True)
class Preflight:
    """None: not known. targets: of each the ISA levels. replaces: what stands at `out` now. seconds_cached,
    seconds_built: with all of its kernels found in the cache, and with none.
    """

    source: str
    survey: Survey
    out: Path
    replaces: str | None
    targets: Mapping[str, Sequence[str]]
    dtype: str
    max_context: int | None
    block: int
    write_bytes: int
    memory_bytes: int
    disk_bytes: int
    seconds_cached: float | None
    seconds_built: float | None

    @property
    def json(self) -> dict[str, Any]:
        found = self.survey
        known = bool(found.counts)
        return {
            "source": self.source,
            "format": found.kind,
            "read_bytes": found.num_bytes if known else None,
            "tensors": len(found.counts) if known else None,
            "weights": found.num_weights if known else None,
            "artifact": str(self.out),
            "replaces": self.replaces,
            "write_bytes": self.write_bytes if known else None,
            "disk_free_bytes": self.disk_bytes,
            "targets": {name: list(levels) for name, levels in self.targets.items()},
            "dtype": self.dtype,
            "max_context": self.max_context,
            "block": self.block,
            "memory_bytes": self.memory_bytes if known else None,
            "seconds_if_cached": self.seconds_cached,
            "seconds_if_built": self.seconds_built,
        }

    def check(self) -> None:
        """Raises CompileError where the disk has no room."""
        if self.disk_bytes < self.write_bytes:
            raise CompileError(
                f"it takes about {megabytes(self.write_bytes)} and the disk has "
                f"{megabytes(self.disk_bytes)} free",
                where=str(self.out),
                todo="Free some, or choose another place with -o",
            )

    def __str__(self) -> str:
        rows = {
            "reads": self._reads(), "writes": self._writes(), "for": self._for(), "memory": self._memory(),
            "time": self._time(),
        }  # fmt: skip
        return "\n".join(f"  {name:7} {text}" for name, text in rows.items())

    def _reads(self) -> str:
        found, kind = self.survey, KINDS[self.survey.kind]
        if not found.counts:
            return f"{self.source}: {kind}"
        size = f"{megabytes(found.num_bytes)}, " if found.num_bytes else ""
        millions = f"{found.num_weights / 1e6:,.1f} M"
        return f"{self.source}: {kind}, {size}{len(found.counts):,} tensors, {millions} weights"

    def _writes(self) -> str:
        size = f"about {megabytes(self.write_bytes)} (free: {megabytes(self.disk_bytes)})"
        replaced = f"; replaces {self.replaces}" if self.replaces else ""
        return f"{self.out}: {size if self.survey.counts else 'of unknown size'}{replaced}"

    def _for(self) -> str:
        named = (f"{name} ({', '.join(levels)})" if levels else name for name, levels in self.targets.items())
        context = f"{self.max_context:,} tokens" if self.max_context else "the model's own"
        return f"{', '.join(named)}; {self.dtype}; context {context}; blocks of {self.block} tokens"

    def _memory(self) -> str:
        if not self.survey.counts:
            return "not known before the import"
        return f"about {megabytes(self.memory_bytes)} at most"

    def _time(self) -> str:
        if slowdown(1) > MOST_SLOWDOWN:
            return f"not known: the machine is busy (load {_load():.0f}, cores {num_cores()})"
        if self.seconds_cached is None and self.seconds_built is None:
            return "not known: nothing like it was compiled on this machine before"
        parts: list[str] = []
        if self.seconds_cached is not None:
            parts.append(f"{duration(self.seconds_cached)} if its kernels are in the cache")
        if self.seconds_built is not None:
            parts.append(f"{duration(self.seconds_built)} if {'none is' if parts else 'all are built'}")
        return f"about {', '.join(parts)} (by the compiles here before, and the load now)"


def preflight(
    source: Any,
    survey: Survey,
    out: Path,
    *,
    targets: Mapping[str, Sequence[str]],
    num_kinds: int,
    dtype: str,
    max_context: int | None,
    block: int,
    rates: Rates,
    cached: bool,
) -> Preflight:
    """num_kinds: of targets that share a file of weights. targets: see Preflight. cached: whether kernels are
    looked for in the cache.
    """
    variants = sum(max(1, len(levels)) for levels in targets.values())
    weights = survey.num_weights * SIZES[dtype]
    write_bytes = weights * num_kinds + variants * KERNEL_BYTES
    seconds = [_seconds(survey, targets, dtype, write_bytes, rates, built) for built in (False, True)]
    return Preflight(
        source=str(source) if isinstance(source, str | Path) else type(source).__name__,
        survey=survey,
        out=out,
        replaces=_standing(out),
        targets=targets,
        dtype=dtype,
        max_context=max_context or survey.max_context,
        block=block,
        write_bytes=write_bytes,
        memory_bytes=_memory(survey, targets),
        disk_bytes=shutil.disk_usage(out.parent).free,
        seconds_cached=seconds[0] if cached else None,
        seconds_built=seconds[1],
    )


def _memory(survey: Survey, targets: Mapping[str, Sequence[str]]) -> int:
    """At the import's peak, or while compilers run beside what the import left."""
    largest = max(survey.counts, default=0) * 4
    jobs = max(OBJECTS * len(levels) or 16 for levels in targets.values())
    each = max(BUILDER_BYTES.get(name, GPU_BUILDER_BYTES) for name in targets)
    return IMPORT_BYTES + WORK_BYTES + max(largest, min(num_cores(), jobs) * each)


def _seconds(
    survey: Survey,
    targets: Mapping[str, Sequence[str]],
    dtype: str,
    num_bytes: int,
    rates: Rates,
    built: bool,
) -> float | None:
    """With the load that the machine has now. None where a part of it was never measured."""
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
    return max(1.0, (_load() + threads) / max(num_cores(), threads))


def _load() -> float:
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def _standing(out: Path) -> str | None:
    """What a compile to `out` replaces."""
    if not out.is_dir() or not any(out.iterdir()):
        return None
    num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    kind = "the artifact" if (out / "manifest.json").is_file() else "the directory"
    return f"{kind} there, {megabytes(num_bytes)}"


def megabytes(num_bytes: int) -> str:
    if num_bytes < 1e9:
        return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:,.1f} MB"
    return f"{num_bytes / 1e9:,.1f} GB"


def duration(seconds: float) -> str:
    """To two digits, which is more than it is worth."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds / 60:.1f} min"


@contextmanager
def refused_writes(flight: Preflight) -> Iterator[None]:
    """Raises CompileError where something within could not be written: the place, and what it takes."""
    try:
        yield
    except OSError as error:
        is_locked = error.errno in LOCKED and _is_written(str(error.filename or ""), flight.out)
        if error.errno in FULL or is_locked:
            raise _refused(error, flight) from error
        raise


def _refused(error: OSError, flight: Preflight) -> CompileError:
    is_temporary = str(error.filename or "").startswith(os.path.join(tempfile.gettempdir(), PREFIX))
    place = Path(tempfile.gettempdir()) if is_temporary else flight.out
    need = f"it takes about {megabytes(TEMPORARY_BYTES if is_temporary else flight.write_bytes)}"
    free = megabytes(shutil.disk_usage(place if is_temporary else flight.out.parent).free)
    what = f"{need} and {free} are free" if error.errno in FULL else "it cannot be written"
    todo = "Set TMPDIR to another folder" if is_temporary else "Choose another place with -o"
    return CompileError(
        f"{(error.strerror or 'no space left on device').lower()}: {what}",
        where=str(place),
        todo=f"Free some, or {todo[0].lower()}{todo[1:]}" if error.errno in FULL else todo,
    )


def _is_written(file: str, out: Path) -> bool:
    return f".{out.name}.partial-" in file or file.startswith(os.path.join(tempfile.gettempdir(), PREFIX))
