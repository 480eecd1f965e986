"""The runtime's paging, sharing and scheduling against their bounds. Ends with 1 where a bound does not hold.

python benchmarks/paging.py allocator | waste | sharing | forks | overload | soak   (--help says more)
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from pagingbench import allocator, forks, overload, sharing, soak, waste
from pagingbench.engines import DEMO
from pagingbench.report import Report
from runtime.errors import OctavoError

app = typer.Typer(add_completion=False, no_args_is_help=True, callback=lambda: None, help=__doc__)

Engine = Annotated[Path, typer.Option("--engine", help="An artifact.")]
Seed = Annotated[int, typer.Option(help="Of prompts and of what else is random.")]
Json = Annotated[bool, typer.Option("--json", help="A JSON object instead of a table.")]
Out = Annotated[Path | None, typer.Option(help="A file of results, to which this one is added.")]


@app.command("allocator")
def allocator_command(
    operations: Annotated[int, typer.Option(min=10)] = allocator.OPERATIONS,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """A million blocks and ten million random operations."""
    finish(allocator.run(operations), as_json, out)


@app.command("waste")
def waste_command(engine: Engine = DEMO, seed: Seed = 0, as_json: Json = False, out: Out = None) -> None:
    """Unused KV slots on the trace of 200 requests (benchmarks/data)."""
    finish(waste.run(engine, seed=seed), as_json, out)


@app.command("sharing")
def sharing_command(engine: Engine = DEMO, seed: Seed = 0, as_json: Json = False, out: Out = None) -> None:
    """32 requests with one system prompt of 1,024 tokens, and the first token after a prefix hit."""
    finish(sharing.run(engine, seed=seed), as_json, out)


@app.command("forks")
def forks_command(engine: Engine = DEMO, seed: Seed = 0, as_json: Json = False, out: Out = None) -> None:
    """A fork of a request of 2,000 tokens, and 8 samples of one prompt."""
    finish(forks.run(engine, seed=seed), as_json, out)


@app.command("overload")
def overload_command(
    engine: Engine = DEMO,
    shape: Annotated[list[str] | None, typer.Option(help="PROMPTxNEW tokens, such as 64x64.")] = None,
    pairs: Annotated[int, typer.Option(help="Turns of each engine.", min=1)] = overload.PAIRS,
    alone: Annotated[int, typer.Option(help="Requests that also run alone.", min=1)] = overload.COUNT,
    seed: Seed = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Memory for 4 requests and 40 submitted at once, beside static batches of 4."""
    finish(overload.run(engine, shape or overload.SHAPES, pairs, alone, seed), as_json, out)


@app.command("soak")
def soak_command(
    engine: Engine = DEMO,
    minutes: Annotated[float, typer.Option(help="How long.", min=0.1)] = 30.0,
    seed: Seed = 0,
    as_json: Json = False,
    out: Out = None,
) -> None:
    """Random load from threads and tasks, with faults injected."""
    finish(soak.run(engine, minutes, seed), as_json, out)


def finish(report: Report, as_json: bool, out: Path | None) -> None:
    if as_json:
        print(json.dumps(report.json, indent=1))
    else:
        report.show()
    if out is not None:
        add(out, report)
    if not report.holds:
        raise typer.Exit(1)


def add(path: Path, report: Report) -> None:
    """A newer result of a name takes the older one's place."""
    known = json.loads(path.read_text()) if path.exists() else {"machine": machine(), "results": []}
    taken = {"taken": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ")}
    known["results"] = [r for r in known["results"] if r["name"] != report.name] + [report.json | taken]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=1) + "\n")


def machine() -> dict[str, object]:
    names = {"vendor_id", "cpu family", "model", "model name"}
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    cpu = {key.strip(): value.strip() for key, _, value in pairs if key.strip() in names}
    return {"cpu": cpu, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


if __name__ == "__main__":
    try:
        app()
    except OctavoError as error:
        sys.exit(f"error: {error}")
