"""Octavo beside another engine in one run: a table, and a file of results with its plot."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from rich.console import Console

from sidebyside import comparison, environment, plot, results, summary, table
from sidebyside.peers import PEERS
from sidebyside.worker import WorkerFailed
from sidebyside.workloads import WORKLOADS

T = TypeVar("T")

BUILD = Path(__file__).parent.parent / "build"
FORMATS = ("f32", "bf16", "int8", "int8-kv8", "int4", "int4-kv8")
SOURCE = BUILD / "demo" / "SmolLM2-135M-Instruct.Q4_1.gguf"


def command(
    peer: Annotated[str, typer.Argument(help=f"One of {', '.join(PEERS)}.")],
    workload: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(WORKLOADS)}; default all.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(FORMATS)}; default what the peer has.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Turns of each engine at each workload.", min=1)] = 5,
    quick: Annotated[bool, typer.Option(help="Two pairs: to see that all works.")] = False,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    engines: Annotated[
        str, typer.Option(help="Octavo's artifacts, each at {} its format; for f32 without -{}.")
    ] = str(BUILD / "smollm2-{}.octavo"),
    source: Annotated[Path, typer.Option(help="The GGUF file that all were made from.")] = SOURCE,
    env: Annotated[Path | None, typer.Option(help="An environment that has the peer already.")] = None,
    out: Annotated[Path | None, typer.Option(help="The results file; the plot goes beside it.")] = None,
) -> None:
    """Measure Octavo and a peer in turn on the same prompts, each in a process of its own."""
    chosen = _known("peer", [peer], PEERS)[0]
    dtypes = _known("dtype", dtype or list(chosen.formats), {name: name for name in chosen.formats})
    workloads = _known("workload", workload or list(WORKLOADS), WORKLOADS)
    artifacts = {
        name: Path(engines.replace("-{}", "") if name == "f32" else engines.format(name)) for name in dtypes
    }
    for path in (source, *(each / "manifest.json" for each in artifacts.values())):
        if not path.exists():
            raise typer.BadParameter(f"{path} is missing; `make bench-engines` makes it")
    setup = comparison.Setup(
        source, artifacts, BUILD / "peers", env and environment.python_of(env), threads, 2 if quick else pairs
    )
    out = out or results.default_path(BUILD / "bench")
    for result in comparison.compare(chosen, dtypes, workloads, setup):
        results.add(out, result)
    rows = list(summary.rows(results.read(out)))
    Console(width=120).print(table.terminal(row for row in rows if row.peer == peer))
    plot.draw(rows, out.with_suffix(".svg"), results.cpu_of(out))
    print(f"wrote {out} and {out.with_suffix('.svg')}", file=sys.stderr)


def _known(what: str, names: list[str], known: Mapping[str, T]) -> list[T]:
    """What the names stand for. Raises typer.BadParameter."""
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{what} {name!r}: choose from {', '.join(known)}")
    return [known[name] for name in names]


if __name__ == "__main__":
    try:
        typer.run(command)
    except (WorkerFailed, results.ResultsError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
