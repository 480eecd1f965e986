"""Runs with drafts and without, in turn; the outputs must be equal."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import runtime
from compiler.cli.drafts import Counts
from runtime import Engine, Sampling
from speculationbench.workloads import Workload


@dataclass(frozen=True)
class Run:
    """Seconds in which the tokens came, prompts included; token ids of each request."""

    seconds: float
    token_ids: list[list[int]]

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


@dataclass(frozen=True)
class Pairs:
    plain: list[Run]
    drafted: list[Run]
    drafts: Counts

    @property
    def ratios(self) -> list[float]:
        return [a.seconds / b.seconds for a, b in zip(self.plain, self.drafted, strict=True)]

    def figures(self) -> dict[str, Any]:
        return {
            "speedup": statistics.median(self.ratios),
            "speedup_least": min(self.ratios),
            "speedup_most": max(self.ratios),
            "tokens_per_s": statistics.median(run.tokens_per_s for run in self.drafted),
            "plain_tokens_per_s": statistics.median(run.tokens_per_s for run in self.plain),
            "best_possible": best_possible(self.drafts.places),
            **self.drafts.figures(),
        }


def best_possible(places: Sequence[tuple[int, int]]) -> float:
    """Tokens that a step with drafts gives where all are as long as the longest was, which is the speed-up if
    neither drafting nor verifying took time: one, and the chance of each place that all up to it are right.

    places: (drafted, accepted). A draft is accepted where all before it were.
    """
    tokens, chance, before = 1.0, 1.0, None
    for drafted, accepted in places:
        reached = drafted if before is None else min(drafted, before)  # after accepted ones alone
        if not reached:
            break
        chance *= accepted / reached
        tokens, before = tokens + chance, accepted
    return tokens


def measure(engine: Engine, workload: Workload, pairs: int, temperature: float = 0.0) -> Pairs:
    """A pair first that is not counted. Raises AssertionError where the outputs differ."""
    numbers = itertools.count()
    options = dict(max_new_tokens=workload.new_tokens, ignore_eos=True, temperature=temperature, seed=1)
    sampling = Sampling(**{**options, **workload.sampling})
    plainly = replace(sampling, draft_tokens=0)
    _pair(engine, workload, sampling, plainly, False, numbers)
    before = Counts.of(engine.stats())
    found = [_pair(engine, workload, sampling, plainly, bool(i % 2), numbers) for i in range(pairs)]
    drafts = Counts.of(engine.stats()).since(before)
    return Pairs([plain for plain, _ in found], [drafted for _, drafted in found], drafts)


def _pair(
    engine: Engine,
    workload: Workload,
    sampling: Sampling,
    plainly: Sampling,
    swapped: bool,
    numbers: itertools.count[int],
) -> tuple[Run, Run]:
    order = (sampling, plainly) if swapped else (plainly, sampling)
    runs = [_run(engine, workload, s, f"run {next(numbers)}") for s in order]
    plain, drafted = reversed(runs) if swapped else runs
    assert plain.token_ids == drafted.token_ids, "drafts changed an output"
    return plain, drafted


def _run(engine: Engine, workload: Workload, sampling: Sampling, salt: str) -> Run:
    """salt: prompts are computed anew in every run."""
    groups = [workload.prompts] if workload.at_once else [[prompt] for prompt in workload.prompts]
    found: list[list[int]] = []
    start = time.perf_counter()
    for prompts in groups:
        completions = runtime.generate(engine, prompts, sampling, cache_salt=salt)
        assert isinstance(completions, list)
        found += [completion.token_ids for completion in completions]
    return Run(time.perf_counter() - start, found)
