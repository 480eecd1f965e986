"""`octavo bench`: an engine's throughput, latency and memory on random tokens."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    engine: Annotated[Path, typer.Argument(help="An engine artifact, NAME.octavo.")],
    prompt_tokens: Annotated[int, typer.Option(help="Random prompt tokens per request.", min=1)] = 512,
    new_tokens: Annotated[int, typer.Option(help="New tokens per request.", min=2)] = 128,
    requests: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 1,
    context_tokens: Annotated[
        int, typer.Option(help="Tokens already in the cache before the prompt.", min=0)
    ] = 0,
    threads: Annotated[int | None, typer.Option(help="Default: the cores this process may use.")] = None,
    repeats: Annotated[int, typer.Option(help="Figures are medians over this many runs.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of the random token ids.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefill and decode throughput, time to the first token, load time and peak memory.

    octavo bench model.octavo --json

    octavo bench model.octavo --requests 16 --prompt-tokens 128 --new-tokens 128
    """
    workload = Workload(prompt_tokens, new_tokens, requests, context_tokens, seed)
    figures = run(engine, workload, threads, repeats)
    if as_json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:22} {value:,.4g}" if isinstance(value, float) else f"{key:22} {value:,}")


@dataclass(frozen=True)
class Workload:
    prompt_tokens: int
    new_tokens: int
    num_requests: int
    context_tokens: int
    seed: int


@dataclass(frozen=True)
class Times:
    """Seconds since submission, of one run: each request's first token; the end."""

    first: list[float]
    end: float
    num_after_first: int  # tokens that came after every request had its first


def run(path: Path, workload: Workload, threads: int | None, repeats: int) -> dict[str, Any]:
    """Load the engine, run the workload once to warm up and `repeats` times, and return the medians."""
    import numpy as np

    import runtime

    start = time.perf_counter()
    engine = runtime.load(path, threads=threads)
    load_s = time.perf_counter() - start
    rng = np.random.default_rng(workload.seed)
    contexts = [_random_ids(rng, engine, workload.context_tokens) for _ in range(workload.num_requests)]
    try:
        runs = [_run_once(engine, workload, contexts, rng) for _ in range(repeats + 1)][1:]
    finally:
        engine.close()
    return {
        **_figures(runs, workload),
        "load_s": load_s,
        "peak_rss_bytes": _peak_rss_bytes(),
        **_inputs(workload, threads),
    }


def _random_ids(rng: Any, engine: Any, num_tokens: int) -> list[int]:
    return [int(i) for i in rng.integers(0, engine.info.vocab_size, num_tokens)]
