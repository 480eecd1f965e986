"""`octavo bench`: an engine's throughput, latency and memory on random tokens, beside the bounds."""

from __future__ import annotations

import json
import resource
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import runtime
from compiler.cli.options import (
    Digest,
    EnginePath,
    KvBlocks,
    KvMemory,
    MaxRequests,
    MaxStepTokens,
    SwapMemory,
    Target,
    Threads,
    given,
)
from compiler.errors import CompileError
from runtime import machine

if TYPE_CHECKING:
    from compiler.profile.limits import Limits
    from runtime import Engine


def command(
    engine: EnginePath,
    prompt_tokens: Annotated[int, typer.Option(help="Random prompt tokens per request.", min=1)] = 512,
    new_tokens: Annotated[int, typer.Option(help="New tokens per request.", min=2)] = 128,
    requests: Annotated[int, typer.Option(help="Requests at once.", min=1)] = 1,
    context_tokens: Annotated[
        int, typer.Option(help="Cached tokens before the prompt: whole KV blocks.", min=0)
    ] = 0,
    target: Target = None,
    threads: Threads = None,
    repeats: Annotated[int, typer.Option(help="Figures are medians over this many runs.", min=1)] = 3,
    seed: Annotated[int, typer.Option(help="Of the random token ids.", min=0)] = 0,
    digest: Digest = None,
    kv_memory: KvMemory = None,
    kv_blocks: KvBlocks = None,
    swap_memory: SwapMemory = None,
    max_step_tokens: MaxStepTokens = None,
    max_requests: MaxRequests = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefill and decode throughput, time to the first token, load time and peak memory.

    bandwidth_share is what decode reaches of a plain read's rate, peak_share what prefill reaches of the
    arithmetic's; both rates are measured in turn with the runs. Of a GPU's target there are no shares.

    octavo bench model.octavo --json

    octavo bench model.octavo --requests 16 --prompt-tokens 128 --new-tokens 128

    octavo bench model.octavo --requests 16 --kv-memory 512MiB --swap-memory 1GiB

    octavo bench model.octavo --target cuda:sm_90 --requests 64
    """
    if context_tokens:
        _check_context(engine, context_tokens)
    workload = Workload(prompt_tokens, new_tokens, requests, context_tokens, seed)
    memory = given(
        digest=digest,
        kv_memory=kv_memory,
        kv_blocks=kv_blocks,
        swap_memory=swap_memory,
        max_step_tokens=max_step_tokens,
        max_requests=max_requests,
    )
    figures = run(engine, workload, target, threads, repeats, memory)
    if as_json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:22} {_shown(key, value)}")


def _check_context(engine: Path, context_tokens: int) -> None:
    """Only whole blocks are found in the prefix cache."""
    groups = runtime.Artifact.open(engine, verify="fast").manifest.kv_groups
    if context_tokens % groups[0].block:
        raise CompileError(
            f"it must be a multiple of {groups[0].block}, {engine}'s KV block",
            where=f"--context-tokens {context_tokens}",
            todo="Give whole blocks: they alone are found in the prefix cache",
        )


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "all"
    if key.endswith("_share"):
        return f"{value:.0%}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Workload:
    prompt_tokens: int
    new_tokens: int
    num_requests: int
    context_tokens: int
    seed: int


@dataclass(frozen=True)
class Times:
    """One run: seconds since submission of every new token, by request."""

    tokens: list[list[float]]

    @property
    def prefilled_s(self) -> float:
        """When every request has its first new token."""
        return max(times[0] for times in self.tokens)

    @property
    def end_s(self) -> float:
        return max(times[-1] for times in self.tokens)

    @property
    def decoded_tokens(self) -> int:
        """New tokens after the prefill."""
        return sum(time > self.prefilled_s for times in self.tokens for time in times)

    def figures(self, workload: Workload) -> dict[str, float]:
        return {
            "prefill_tokens_per_s": workload.prompt_tokens * workload.num_requests / self.prefilled_s,
            "decode_tokens_per_s": self.decoded_tokens / (self.end_s - self.prefilled_s),
            "output_tokens_per_s": sum(map(len, self.tokens)) / self.end_s,
            "first_token_s": statistics.median(times[0] for times in self.tokens),
        }


def run(
    path: Path,
    workload: Workload,
    target: str | None,
    threads: int | None,
    repeats: int,
    memory: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Load the engine and measure it: the medians of `repeats` runs. memory: options of load()."""
    import runtime
    from compiler.profile.limits import Limits

    start = time.perf_counter()
    engine = runtime.load(path, target=target, threads=threads, **(memory or {}))
    load_s = time.perf_counter() - start
    artifact, ran = runtime.Artifact.open(path, verify="fast"), engine.stats().target
    try:
        peak_rss_bytes, measured, runs = _measure(engine, artifact, workload, threads, repeats)
    finally:
        engine.close()
    limits = Limits.median(measured) if measured else None
    figures = [times.figures(workload) for times in runs]
    return {
        **{key: statistics.median(each[key] for each in figures) for key in figures[0]},
        **(_shares(artifact, workload, limits, runs) if limits else {}),
        "load_s": load_s,
        "peak_rss_bytes": peak_rss_bytes,
        **(asdict(limits) if limits else {}),
        **asdict(workload),
        **(memory or {}),
        "target": ran,
        "threads": threads,
        "repeats": repeats,
    }


def _measure(
    engine: Engine, artifact: runtime.Artifact, workload: Workload, threads: int | None, repeats: int
) -> tuple[int, list[Limits], list[Times]]:
    """Run the workload once to warm up: the peak memory then. Then the machine's limits (of the target cpu)
    and the workload in turn."""
    import numpy as np

    import runtime
    from compiler.profile.limits import Probe

    rng = np.random.default_rng(workload.seed)

    def random_ids(num_tokens: int) -> list[int]:
        return [int(i) for i in rng.integers(0, engine.model.vocab_size, num_tokens)]

    contexts = [random_ids(workload.context_tokens) for _ in range(workload.num_requests)]

    def run_once() -> Times:
        prompts = [context + random_ids(workload.prompt_tokens) for context in contexts]
        return _run_once(engine, prompts, workload.new_tokens)

    if workload.context_tokens:  # into the prefix cache, where every repeat finds it
        runtime.generate(engine, contexts, max_new_tokens=1, ignore_eos=True)
    run_once()
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    on_cpu = engine.stats().target == "cpu"
    probe = Probe(artifact, threads or machine.default_threads()) if on_cpu else None
    rounds = [(probe and probe.measure(), run_once()) for _ in range(repeats)]
    return peak_rss_bytes, [limits for limits, _ in rounds if limits], [times for _, times in rounds]


def _shares(
    artifact: runtime.Artifact, workload: Workload, limits: Limits, runs: list[Times]
) -> dict[str, float]:
    """Of the machine's bounds. They need the compiler's libraries, which are not loaded before the runs."""
    from compiler.profile.shares import Throughput, shares

    found = Throughput(
        num_requests=workload.num_requests,
        prompt_tokens=workload.prompt_tokens,
        context_tokens=workload.context_tokens,
        new_tokens=workload.new_tokens,
        prefill_s=statistics.median(times.prefilled_s for times in runs),
        decode_s=statistics.median(times.end_s - times.prefilled_s for times in runs),
        decode_tokens=round(statistics.median(times.decoded_tokens for times in runs)),
    )
    return shares(artifact, found, limits)


def _run_once(engine: Any, prompts: list[list[int]], new_tokens: int) -> Times:
    import runtime

    tokens: list[list[float]] = [[] for _ in prompts]
    start = time.perf_counter()
    events = runtime.generate(engine, prompts, stream=True, max_new_tokens=new_tokens, ignore_eos=True)
    assert not isinstance(events, list)
    for event in events:
        if event.token_id is not None:
            tokens[event.prompt_index].append(time.perf_counter() - start)
    return Times(tokens)
