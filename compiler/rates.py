"""How fast compiles went on this machine before: what an estimate of the next one's time rests on.

Kept beside the kernels that were built, in the cache; without a cache, or before the first compile there, no
time is estimated.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

FILE = "rates.json"
MAX_BYTES = 1 << 20
FIXED_SHARE = 0.5  # of an import's time, that no size of the model changes: importing torch
LEAST_BYTES = 16 << 20  # of a model from which anything but kernels can be measured
NEWEST_SHARE = 0.5  # of a rate, from the newest compile


@dataclass(frozen=True)
class Rates:
    """CPU seconds, which other load on the machine does not change much.

    import_s: all before packing, of a model of import_tensors tensors. pack_s, by format and element type,
    and hash_s: of a byte written. link_s and build_s, by target: of a kernel that was found in the cache, and
    of one that was not. verify_s: of what remains.
    """

    import_s: float = math.nan
    import_tensors: float = math.nan
    hash_s: float = math.nan
    verify_s: float = math.nan
    pack_s: Mapping[str, float] = field(default_factory=dict[str, float])
    link_s: Mapping[str, float] = field(default_factory=dict[str, float])
    build_s: Mapping[str, float] = field(default_factory=dict[str, float])

    def importing(self, num_tensors: int) -> float:
        grown = num_tensors / self.import_tensors
        return self.import_s * (FIXED_SHARE + (1 - FIXED_SHARE) * grown)


def measured_rates(
    cpu_s: Mapping[str, float],
    packed: str,
    num_bytes: int,
    num_tensors: int,
    built: Mapping[str, tuple[int, int]],
) -> Rates:
    """cpu_s: by stage. packed: format and element type. built: of each target kernels found, and built."""
    build = {name.removeprefix("build "): s for name, s in cpu_s.items() if name.startswith("build ")}
    kernels = Rates(
        link_s={name: build[name] / hits for name, (hits, misses) in built.items() if hits and not misses},
        build_s={name: build[name] / misses for name, (hits, misses) in built.items() if misses and not hits},
    )
    if num_bytes < LEAST_BYTES:
        return kernels
    later = ("pack ", "build ", "hash", "verify ")
    return replace(
        kernels,
        import_s=sum(s for name, s in cpu_s.items() if not name.startswith(later)),
        import_tensors=num_tensors,
        hash_s=cpu_s["hash"] / num_bytes,
        verify_s=sum(s for name, s in cpu_s.items() if name.startswith("verify ")),
        pack_s={packed: sum(s for name, s in cpu_s.items() if name.startswith("pack ")) / num_bytes},
    )


def read_rates(folder: Path | None) -> Rates:
    """Those kept in a folder; where there are none, or they are damaged, each is NaN."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        if folder is not None and (folder / FILE).stat().st_size <= MAX_BYTES:
            return _parsed(json.loads((folder / FILE).read_text()))
    return Rates()


def _parsed(raw: Mapping[str, object]) -> Rates:
    """Raises TypeError, ValueError."""
    given = {name: raw[name] for name in asdict(Rates()) if name in raw}
    numbers = {name: _number(found) for name, found in given.items() if not isinstance(found, dict)}
    tables = {
        name: {str(key): _number(value) for key, value in found.items()}
        for name, found in given.items()
        if isinstance(found, dict)
    }
    return Rates(**numbers, **tables)  # type: ignore[arg-type]


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
        raise ValueError(f"{value!r} is no rate")
    return float(value)


def keep_rates(folder: Path | None, measured: Rates) -> None:
    """Blend a compile's rates into those kept; what it did not measure (NaN) stays as it is."""
    if folder is None:
        return
    old, found = asdict(read_rates(folder)), dict[str, object]()
    for name, value in asdict(measured).items():
        if isinstance(value, dict):
            before: dict[str, float] = old[name]
            found[name] = before | {key: _blend(before.get(key, math.nan), new) for key, new in value.items()}
        elif not math.isnan(blended := _blend(old[name], value)):
            found[name] = blended
    partial = folder / f".{FILE}.{secrets.token_hex(4)}"
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(found))
        os.replace(partial, folder / FILE)
    with suppress(OSError):
        partial.unlink(missing_ok=True)


def _blend(old: float, new: float) -> float:
    if math.isnan(old) or math.isnan(new):
        return old if math.isnan(new) else new
    return old + (new - old) * NEWEST_SHARE
