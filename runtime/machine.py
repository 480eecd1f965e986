"""What this machine has, from Linux's own files: CPU features, threads this process may use, free memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from runtime.errors import ResourceError, shown

_UNITS = {
    "": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
MAX_DIGITS = 30
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def arch() -> str:
    name = os.uname().machine.lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


def spelling(feature: str) -> str:
    """One spelling per CPU feature: some write avx512vnni and sse4.1, others avx512_vnni and sse4_1."""
    return feature.lower().replace("_", "").replace(".", "").replace("-", "")


def cpu_features(cpuinfo: str | None = None) -> frozenset[str]:
    """Features of this CPU, in the spelling of `spelling`."""
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(spelling(name) for name in value.split())
    return frozenset()


def default_threads() -> int:
    """Cores this process may run on, by affinity and by cgroup quota (rounded down, at least 1)."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(int(quota) for quota in _cpu_quotas())]))


def _cgroup_dirs() -> Iterator[Path]:
    """This process's cgroup (version 2) and its parents, each of which may set a limit."""
    base = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::"):
            place = base / line[3:].lstrip("/")
            yield from (p for p in (place, *place.parents) if p == base or base in p.parents)


def _cpu_quotas() -> Iterator[float]:
    for place in _cgroup_dirs():
        words = _words(place / "cpu.max")
        if len(words) == 2 and words[0] != "max":
            yield int(words[0]) / int(words[1])
    quota, period = (
        _words(Path("/sys/fs/cgroup/cpu") / f"cpu.cfs_{what}_us") for what in ("quota", "period")
    )
    if quota and period and int(quota[0]) > 0:
        yield int(quota[0]) / int(period[0])


def has_huge_pages() -> bool:
    """Whether memory that asks for huge pages gets them."""
    words = _words(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return "[always]" in words or "[madvise]" in words


def free_memory() -> int:
    """Bytes that can be taken without swapping or meeting a cgroup's limit."""
    free = [
        int(line.split()[1]) << 10
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    ]
    for place in _cgroup_dirs():
        limit, used = _words(place / "memory.max"), _words(place / "memory.current")
        if limit and used and limit[0] != "max":
            free.append(max(0, int(limit[0]) - int(used[0]) + _file_pages(place)))
    return min(free)


def _file_pages(place: Path) -> int:
    """Bytes of files that a cgroup keeps in memory and gives back when memory lacks: among them, after they
    were hashed, the weights that are about to be counted as taken."""
    words = _words(place / "memory.stat")
    kept = dict(zip(words[::2], words[1::2], strict=False))
    return sum(int(kept.get(name, 0)) for name in ("active_file", "inactive_file"))


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def parse_bytes(size: int | str, name: str = "", other: str = "") -> int:
    """Bytes from a number or a text such as "2GiB", "1.5 GB". name, other: the option's, and what else it
    takes, for the message."""
    found = size if isinstance(size, int) and not isinstance(size, bool) else _from_text(size)
    if found is None or not 0 <= found < 2**63:
        todo = f"Give bytes as a number, or a text such as '2GiB'{other}"
        raise ResourceError(f"{shown(size)} is not a size", where=name, todo=todo)
    return found


def _from_text(size: object) -> int | None:
    match = _SIZE.fullmatch(size) if isinstance(size, str) else None
    if match is None or match[2].lower() not in _UNITS or len(match[1]) > MAX_DIGITS:
        return None
    return int(float(match[1]) * _UNITS[match[2].lower()])
