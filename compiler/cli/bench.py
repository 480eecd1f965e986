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
from compiler.cli.drafts import Counts, speedup
from compiler.cli.options import (
    Acceptance,
    Digest,
    Draft,
    EnginePath,
    KvBlocks,
    KvMemory,
    MaxDraftTokens,
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
    draft: Draft = None,
    max_draft_tokens: MaxDraftTokens = None,
    acceptance: Acceptance = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure prefill and decode throughput, time to the first token, load time and peak memory.

    bandwidth_share is what decode reaches of a plain read's rate, peak_share what prefill reaches of the
    arithmetic's; both rates are measured in turn with the runs. Of a GPU's target there are no shares.
    With --draft every run has a pair without drafts, of the same prompts, and `speedup` is how many times as
    fast decode is beside it; there are no shares then. What follows random tokens is drafted easily or
    badly, unlike texts: benchmarks/speculation.py measures those.

    octavo bench model.octavo --json

    octavo bench model.octavo --requests 16 --prompt-tokens 128 --new-tokens 128

    octavo bench model.octavo --requests 16 --kv-memory 512MiB --swap-memory 1GiB

    octavo bench model.octavo --target cuda:sm_90 --requests 64

    octavo bench model.octavo --draft self --repeats 5
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
        draft=draft,
        max_draft_tokens=max_draft_tokens,
        acceptance=acceptance,
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
        return "none" if key == "acceptance" else "all"
    if isinstance(value, list):
        return " ".join(f"{share:.0%}" for share in value) or "none"
    if key.endswith("_share") or key == "acceptance":
        return f"{value:.0%}"
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


SALTS = "", "without drafts"  # of the prefix cache


@dataclass(frozen=True)
class Workload:
    prompt_tokens: int
    new_tokens: int
    num_requests: int
    context_tokens: int
    seed: int


@dataclass(frozen=True)
class Measured:
    """Runs, and the machine's limits in turn with them; or, where there is a drafter, the runs without
    drafts, and what came of the drafts."""

    peak_rss_bytes: int
    runs: list[Times]
    limits: list[Limits]
    plain: list[Times]
    drafts: Counts | None = None

    def draft_figures(self) -> dict[str, Any]:
        if self.drafts is None:
            return {}
        return {**speedup(self.plain, self.runs), **self.drafts.figures()}


@dataclass(frozen=True)
class Times:
    """One run: seconds since submission of every new token, by request."""

    tokens: list[list[float]]

    @property
    def prefilled_s(self) -> float:
        """When every request has its first new token."""
        return max(times[0] for times in self.tokens)

    @property
    def decode_s(self) -> float:
        return self.end_s - self.prefilled_s

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
            "decode_tokens_per_s": self.decoded_tokens / self.decode_s,
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
        measured = _measure(engine, artifact, workload, threads, repeats)
    finally:
        engine.close()
    limits = Limits.median(measured.limits) if measured.limits else None
    figures = [times.figures(workload) for times in measured.runs]
    return {
        **{key: statistics.median(each[key] for each in figures) for key in figures[0]},
        **measured.draft_figures(),
        **(_shares(artifact, workload, limits, measured.runs) if limits else {}),
        "load_s": load_s,
        "peak_rss_bytes": measured.peak_rss_bytes,
        **(asdict(limits) if limits else {}),
        **asdict(workload),
        **(memory or {}),
        "target": ran,
        "threads": threads,
        "repeats": repeats,
    }


def _measure(
    engine: Engine, artifact: runtime.Artifact, workload: Workload, threads: int | None, repeats: int
) -> Measured:
    """Run the workload once to warm up: the peak memory then. Then the machine's limits (of the target cpu),
    or the workload without drafts where there are some, and the workload in turn."""
    import runtime
    from compiler.profile.limits import Probe

    random = RandomPrompts(workload, engine.model.vocab_size)
    drafts = engine.stats().drafter is not None
    if workload.context_tokens:  # into the prefix cache, where every repeat finds it
        for salt in SALTS[: 1 + drafts]:
            runtime.generate(engine, random.contexts, max_new_tokens=1, ignore_eos=True, cache_salt=salt)
    _run_once(engine, random.next(), workload.new_tokens)
    peak_rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if drafts:
        return _measure_drafts(engine, random, workload.new_tokens, repeats, peak_rss_bytes)
    on_cpu = engine.stats().target == "cpu"
    probe = Probe(artifact, threads or machine.default_threads()) if on_cpu else None
    rounds = [
        (probe and probe.measure(), _run_once(engine, random.next(), workload.new_tokens))
        for _ in range(repeats)
    ]
    limits = [limits for limits, _ in rounds if limits]
    return Measured(peak_rss_bytes, [times for _, times in rounds], limits, [])


def _measure_drafts(
    engine: Engine, random: RandomPrompts, new_tokens: int, repeats: int, peak_rss_bytes: int
) -> Measured:
    """Pairs, of which each begins with what the one before ended with."""
    before, runs, plain = Counts.of(engine.stats()), list[Times](), list[Times]()
    for repeat in range(repeats):
        prompts = random.next()
        for drafts in (True, False) if repeat % 2 else (False, True):
            times = _run_once(engine, prompts, new_tokens, None if drafts else 0)
            (runs if drafts else plain).append(times)
    return Measured(peak_rss_bytes, runs, [], plain, Counts.of(engine.stats()).since(before))


class RandomPrompts:
    """New ones each time, but for their contexts."""

    def __init__(self, workload: Workload, vocab_size: int) -> None:
        import numpy as np

        self._rng = np.random.default_rng(workload.seed)
        self._workload, self._vocab_size = workload, vocab_size
        self.contexts = [self._ids(workload.context_tokens) for _ in range(workload.num_requests)]

    def next(self) -> list[list[int]]:
        return [context + self._ids(self._workload.prompt_tokens) for context in self.contexts]

    def _ids(self, num_tokens: int) -> list[int]:
        return [int(i) for i in self._rng.integers(0, self._vocab_size, num_tokens)]


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


def _run_once(
    engine: Any, prompts: list[list[int]], new_tokens: int, draft_tokens: int | None = None
) -> Times:
    """With a salt of its own for runs without drafts: neither run of a pair finds the other's prompts."""
    import runtime

    tokens: list[list[float]] = [[] for _ in prompts]
    start = time.perf_counter()
    salt = SALTS[draft_tokens is not None]
    sampling = runtime.Sampling(max_new_tokens=new_tokens, ignore_eos=True, draft_tokens=draft_tokens)
    events = runtime.generate(engine, prompts, sampling, stream=True, cache_salt=salt)
    assert not isinstance(events, list)
    for event in events:
        if event.token_id is not None:
            tokens[event.prompt_index].append(time.perf_counter() - start)
    return Times(tokens)
