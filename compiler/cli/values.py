"""What a shell is offered as an option's value, each by a function of what was typed so far.

The fixed values are told here again: to import where they come from would take a second at every Tab.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from compiler.cli import completion

MOST_BYTES = 16 << 20  # of a manifest
TARGETS = ("cpu", "cuda:sm_80", "cuda:sm_90", "cuda:sm_100", "hip:gfx942", "triton-interpret")
LEVELS = ("v4-vnni-bf16", "v4-vnni", "v4", "v3", "baseline")


def artifacts(incomplete: str) -> list[str]:
    """Directories NAME.octavo beside what was typed. Where there are none the shell offers its files."""
    folder, _, start = incomplete.rpartition("/")
    base = Path(folder or ("/" if incomplete.startswith("/") else ".")).expanduser()
    try:
        names = sorted(path.name for path in base.glob("*.octavo") if path.is_dir())
    except (OSError, RuntimeError):
        return []
    before = incomplete[: len(incomplete) - len(start)]
    return [before + name for name in names if name.startswith(start)]


def targets(incomplete: str) -> Sequence[str]:
    """Of an artifact those that it has, else all."""
    found = _manifest().get("targets")
    return list(found) if isinstance(found, Mapping) else TARGETS


def stages(incomplete: str) -> list[str]:
    files = _manifest().get("files")
    found = [] if not isinstance(files, Mapping) else [Path(f).stem for f in files if f.startswith("stages/")]
    return [*sorted(found), "graph"]


def levels(incomplete: str) -> list[str]:
    """The last of a list by commas."""
    before, comma, _ = incomplete.rpartition(",")
    return [before + comma + level for level in LEVELS if level not in before.split(",")]


def dtypes(incomplete: str) -> Sequence[str]:
    return ("f32", "bf16")


def weight_formats(incomplete: str) -> Sequence[str]:
    return ("int4", "int8", "fp8", "auto", "own", "none")


def algorithms(incomplete: str) -> Sequence[str]:
    return ("rtn", "gptq", "awq")


def activations(incomplete: str) -> Sequence[str]:
    return ("int8", "int8-token", "fp8", "none")


def kv_formats(incomplete: str) -> Sequence[str]:
    return ("f32", "bf16", "int8", "fp8", "int4", "int2")


def drafters(incomplete: str) -> list[str]:
    """Names, and other artifacts."""
    names = [name for name in ("lookup", "self") if name.startswith(incomplete)]
    return [*names, *artifacts(incomplete)]


def acceptances(incomplete: str) -> Sequence[str]:
    return ("exact", "rejection")


def drafts(incomplete: str) -> Sequence[str]:
    return ("self:int4",)


def blocks(incomplete: str) -> Sequence[str]:
    return ("8", "16", "32", "64")


def _manifest() -> Mapping[str, Any]:
    """Of the artifact that the line names; empty where it names none."""
    for word in completion.words():
        with suppress(OSError, ValueError, RecursionError, RuntimeError):
            with open(Path(word).expanduser() / "manifest.json", "rb") as file:
                found = json.loads(file.read(MOST_BYTES))
            return found if isinstance(found, Mapping) else {}
    return {}
