"""What was measured, as a JSON file to which every comparison adds its own."""

from __future__ import annotations

import json
import re
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compiler.profile.limits import Limits
from sidebyside.pairs import Pair, Pairs
from sidebyside.workloads import Times

VERSION = 1


class ResultsError(Exception):
    pass


@dataclass(frozen=True)
class Result:
    """One workload at one element type against one peer."""

    peer: str
    dtype: str
    peer_format: str
    workload: str
    taken: str  # UTC, to the minute
    num_threads: int
    octavo: dict[str, Any]  # facts of either session
    facts: dict[str, Any]
    measured: Pairs
    shares: dict[str, float]  # of the bounds, Octavo's: bandwidth_share of decode, peak_share of prefill

    @property
    def key(self) -> tuple[str, str, str]:
        return self.peer, self.dtype, self.workload

    @staticmethod
    def parse(value: dict[str, Any]) -> Result:
        measured = value["measured"]
        pairs = [
            Pair(Limits(**pair["limits"]), Times(**pair["octavo"]), Times(**pair["peer"]))
            for pair in measured["pairs"]
        ]
        return Result(**{**value, "measured": Pairs(pairs, measured["agreement"])})


def cpu_name(cpuinfo: str | None = None) -> str:
    """The model, with the numbers that tell generations apart: cloud machines hide them in its name."""
    lines = (Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo).splitlines()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    name = fields.get("model name", "unknown CPU")
    numbers = [fields[key] for key in ("cpu family", "model") if key in fields]
    return f"{name} (family {numbers[0]}, model {numbers[1]})" if len(numbers) == 2 else name


def default_path(folder: Path) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", cpu_name().lower()).strip("-")
    return folder / f"{slug}-{time.strftime('%Y-%m-%d', time.gmtime())}.json"


def read(path: Path) -> list[Result]:
    """Raises ResultsError."""
    return [Result.parse(value) for value in _load(path)["results"]]


def cpu_of(path: Path) -> str:
    """The machine that a file was measured on. Raises ResultsError."""
    return _load(path)["cpu"]


def add(path: Path, result: Result) -> None:
    """Write the result into the file, in place of one of the same peer, type and workload.

    Raises ResultsError if the file is of another machine.
    """
    machine = cpu_name()
    kept = read(path) if path.exists() else []
    if path.exists() and (other := cpu_of(path)) != machine:
        raise ResultsError(f"{path} was measured on {other}, not on {machine}; give another --out")
    merged = {each.key: each for each in (*kept, result)}
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": VERSION, "cpu": machine, "results": [asdict(each) for each in merged.values()]}
    path.write_text(json.dumps(document, indent=1) + "\n")


def _load(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text())
    if document.get("version") != VERSION:
        raise ResultsError(f"{path}: version {document.get('version')}, not {VERSION}; measure again")
    return document
