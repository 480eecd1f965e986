"""Tables of docs/gpu.md: what kernels take and are bound by, from an artifact, and what was measured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Row = Sequence[object]


def markdown(headings: Sequence[str], rows: Iterable[Row]) -> str:
    lines = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def kernel_rows(figures: Sequence[dict[str, Any]], step: str, num_layers: int) -> list[Row]:
    """Kernels that run in every layer, per launch, from the objects of `octavo inspect --kernels --json`."""
    rows: list[Row] = []
    for each in figures:
        if each["step"] != step or each["launches"] < num_layers - 1:
            continue
        counted = each["bytes"] is not None
        rows.append((
            f"`{each['name']}`", each["op"], each["launches"],
            _number(each["bytes"] / each["launches"] / 1e6) if counted else "",
            _number(each["operations"] / each["launches"] / 1e9) if counted else "",
            f"{each['bound_us'] / each['launches']:.2f} {each['bound']}" if counted else "with the one above",
            tile_of(each), each["registers"], each["spills"], f"{each['shared_bytes'] / 1024:.0f}",
            f"{each['occupancy']:.0%}",
            " ".join(f"{n} {kind}" for kind, n in each["matrix"].items()) or "none",
        ))  # fmt: skip
    return rows


HEADINGS = (
    "kernel", "op", "launches a step", "MB", "GFLOP", "bound, us", "tile", "registers", "spills",
    "shared, KiB", "occupancy", "matrix instructions",
)  # fmt: skip


def tile_of(figures: dict[str, Any]) -> str:
    """The constants that are a tile's sizes, its warps and its stages."""
    known = figures["constants"]
    names = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "ROWS", "BLOCK", "PAIRS", "COLUMNS")
    sizes = " x ".join(str(known[name]) for name in names if name in known)
    return f"{sizes + ', ' if sizes else ''}{figures['num_warps']} warps, {figures['num_stages']} stages"


def measured_kernels(model: dict[str, Any]) -> str:
    """Each workload's kernels beside their bounds and torch's."""
    parts: list[str] = []
    for workload in model["workloads"]:
        rows = [
            (each["op"], each["count"], f"{each['time_us']:.1f}", f"{each['bound_us']:.1f} {each['bound']}",
             f"{each['bound_us'] / each['time_us']:.0%}", _or_none(each["torch_us"], "{:.1f}"),
             _or_none(each["torch_us"] and each["torch_us"] / each["time_us"], "{:.2f}"))
            for each in workload["kernels"]
        ]  # fmt: skip
        headings = ("op", "launches", "us each", "bound, us", "of it", "torch, us", "torch / ours")
        parts.append(f"{model['name']}, {workload['name']}:\n\n{markdown(headings, rows)}")
    return "\n".join(parts)


def measured_steps(models: Sequence[dict[str, Any]]) -> str:
    rows: list[Row] = []
    for model in models:
        for workload in model["workloads"]:
            ours, torch_s, bound_us = workload["step_s"], workload["torch_s"], workload["bound_us"]
            rows.append((
                model["name"], workload["name"], f"{ours * 1e3:.3f}", f"{bound_us / 1e3:.3f}",
                f"{bound_us / 1e6 / ours:.0%}", f"{workload['tokens'] / ours:,.0f}",
                _or_none(torch_s and torch_s * 1e3, "{:.3f}"), _or_none(torch_s and torch_s / ours, "{:.2f}"),
            ))  # fmt: skip
    headings = ("model", "step", "ms", "bound, ms", "of it", "tokens/s", "torch.compile, ms", "torch / ours")
    return markdown(headings, rows)


def replace_section(document: Path, name: str, text: str) -> None:
    """What stands between the document's comments `NAME: begin` and `NAME: end`."""
    before = document.read_text()
    marks = re.compile(rf"(<!-- {name}: begin[^>]*-->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    if not marks.search(before):
        raise ValueError(f"{document} has no section {name}")
    document.write_text(marks.sub(lambda found: f"{found[1]}{text}{found[2]}", before))


def _number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 or value == 0 else f"{value:.4f}"


def _or_none(value: float | None, form: str) -> str:
    return "" if not value else form.format(value)
