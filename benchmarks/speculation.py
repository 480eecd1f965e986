"""Drafts beside none: how many times as fast, how many are accepted, and what is possible at best.

python benchmarks/speculation.py chat | copy | random | chance | sixteen   (--help says more)

Ends with 1 where what is promised of a workload does not hold, or an output differs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from paging import add
from speculationbench.pairs import measure
from speculationbench.workloads import WORKLOADS

from pagingbench.engines import DEMO, opened
from pagingbench.report import Bound, Report
from runtime.errors import OctavoError


def command(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(WORKLOADS)}; default all.")
    ] = None,
    engine: Annotated[Path, typer.Option("--engine", help="An artifact of a chat model.")] = DEMO,
    draft: Annotated[str, typer.Option(help="lookup, self or another artifact.")] = "lookup",
    new_tokens: Annotated[int, typer.Option(min=1, help="Of each request.")] = 256,
    pairs: Annotated[int, typer.Option(min=1)] = 3,
    max_draft_tokens: Annotated[int, typer.Option(min=1)] = 8,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    at_least: Annotated[float | None, typer.Option(help="The speed-up that must be reached.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON objects instead of tables.")] = False,
    out: Annotated[Path | None, typer.Option(help="A file of results, to which these are added.")] = None,
) -> None:
    """Pairs of runs with drafts and without, in turn, on one engine, whose outputs must be equal."""
    unknown = [name for name in names or () if name not in WORKLOADS]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}: use {', '.join(WORKLOADS)}")
    held = True
    options = {"draft": draft, "max_draft_tokens": max_draft_tokens, "threads": threads, "max_requests": 16}
    with opened(engine, **options) as loaded:
        for name in names or WORKLOADS:
            workload = WORKLOADS[name](loaded, new_tokens)
            found = measure(loaded, workload, pairs, temperature).figures()
            limit = workload.bound(draft, at_least)
            bounds = [] if limit is None else [Bound("speed beside none", found["speedup"], limit, True)]
            figures = {"engine": engine.name, "draft": Path(draft).name, **found}
            report = Report(f"{name}, {engine.stem} by {Path(draft).stem}", bounds, figures)
            held &= report.holds
            print(json.dumps(report.json, indent=1)) if as_json else report.show()
            if out is not None:
                add(out, report)
    if not held:
        raise typer.Exit(1)


if __name__ == "__main__":
    try:
        typer.run(command)
    except (OctavoError, AssertionError) as error:
        sys.exit(f"error: {error}")
