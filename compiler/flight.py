"""What a compile will read, write and take, said before anything that takes long. Nothing is written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler import estimate
from compiler.disk import check_room, megabytes
from compiler.rates import Rates
from compiler.survey import Survey

KINDS = {"huggingface": "Hugging Face directory", "gguf": "GGUF file", "onnx": "ONNX model",
         "module": "module in memory",
         "shapes": "shapes alone", "unknown": "format not known before the import"}  # fmt: skip


@dataclass(frozen=True)
class Preflight:
    """None: not known. targets: of each the ISA levels. replaces: what stands at `out` now. seconds_cached,
    seconds_built: with all of its kernels found in the cache, and with none. quantized: what is, and as
    what; "" where nothing is.
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
    quantized: str = ""

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
            "quantized": self.quantized or None,
            "memory_bytes": self.memory_bytes if known else None,
            "seconds_if_cached": self.seconds_cached,
            "seconds_if_built": self.seconds_built,
        }

    def check(self) -> None:
        """Raises CompileError where the disk has no room."""
        check_room(self.write_bytes, self.disk_bytes, self.out)

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
        formats = f"{self.dtype}; {self.quantized}" if self.quantized else self.dtype
        return f"{', '.join(named)}; {formats}; context {context}; blocks of {self.block} tokens"

    def _memory(self) -> str:
        if not self.survey.counts:
            return "not known before the import"
        most = "and what quantising takes of text in one layer" if self.quantized else "at most"
        return f"about {megabytes(self.memory_bytes)} {most}"

    def _time(self) -> str:
        if self.quantized:
            return "not known where a model is quantised: most of it goes to text that is run op by op"
        if estimate.slowdown(1) > estimate.MOST_SLOWDOWN:
            return (
                f"not known: the machine is busy (load {estimate.load():.0f}, cores {estimate.num_cores()})"
            )
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
    weight_bytes: float,
    draft_weight_bytes: float,
    max_context: int | None,
    block: int,
    rates: Rates,
    cached: bool,
    quantized: str = "",
) -> Preflight:
    """num_kinds: of targets that share a file of weights. targets: see Preflight. weight_bytes: of one
    weight; draft_weight_bytes: of one of the draft, 0 where there is none. cached: whether kernels are looked
    for in the cache.
    """
    num_bytes = estimate.write_bytes(survey, targets, num_kinds, weight_bytes)
    if draft_weight_bytes:
        num_bytes += estimate.write_bytes(survey, {"cpu": targets["cpu"]}, 1, draft_weight_bytes)
    seconds = [estimate.seconds(survey, targets, dtype, num_bytes, rates, built) for built in (False, True)]
    return Preflight(
        source=str(source) if isinstance(source, str | Path) else type(source).__name__,
        survey=survey,
        out=out,
        replaces=_standing(out),
        targets=targets,
        dtype=dtype,
        max_context=max_context or survey.max_context,
        block=block,
        write_bytes=num_bytes,
        memory_bytes=estimate.memory_bytes(survey, targets),
        disk_bytes=shutil.disk_usage(out.parent).free,
        seconds_cached=seconds[0] if cached else None,
        seconds_built=seconds[1],
        quantized=quantized,
    )


def _standing(out: Path) -> str | None:
    """What a compile to `out` replaces."""
    if not out.is_dir() or not any(out.iterdir()):
        return None
    num_bytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    kind = "the artifact" if (out / "manifest.json").is_file() else "the directory"
    return f"{kind} there, {megabytes(num_bytes)}"


def duration(seconds: float) -> str:
    """To two digits, which is more than it is worth."""
    if seconds < 100:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds / 60:.1f} min"
