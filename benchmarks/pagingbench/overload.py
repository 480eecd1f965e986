"""Memory for 4 requests and 40 submitted at once, beside the best static batches of 4.

The batches run one after the other on an engine with the same settings and more memory than they need; both
engines take turns. Every run has a salt of its own, so that none finds the last one's prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from pagingbench.engines import complete, core, fixed, opened, random_prompt, timed
from pagingbench.report import Bound, Report, spread
from runtime import Completion, Engine, Sampling

CONCURRENT, COUNT, PAIRS = 4, 40, 3
LEAST = 0.8
SHAPES = ("64x64", "16x112")  # tokens of the prompt, and new ones: the second grows eightfold

Job = tuple[list[int], Sampling]


def run(
    path: Path, shapes: Sequence[str] = SHAPES, pairs: int = PAIRS, alone: int = COUNT, seed: int = 0
) -> Report:
    """alone: of how many requests of each shape the output is compared with theirs when they run alone."""
    report = Report("overload")
    for shape in shapes:
        prompt, new = map(int, shape.split("x"))
        found = measure(path, prompt, new, pairs, alone, seed)
        report.figures[shape] = found
        differ = found["differ_from_alone"] + found["differ_from_batches"]
        report.bounds += [
            Bound(
                f"{shape}: throughput over that of batches", found["ratio"]["median"], LEAST, at_least=True
            ),
            Bound(f"{shape}: requests whose tokens or logprobs differ", differ, 1),
        ]
    return report


def measure(path: Path, prompt: int, new: int, pairs: int, alone: int, seed: int) -> dict[str, Any]:
    with opened(path) as ample:
        block = core(ample).scheduler.cache.block
        room = CONCURRENT * -(-(prompt + new - 1) // block)  # the last token is never computed
        jobs = draw(ample, np.random.default_rng(seed), prompt, new)
        with opened(path, kv_blocks=room) as tight:
            static, paged = [], []
            for pair in range(pairs):
                static.append(timed(lambda pair=pair: batches(ample, jobs, str(pair))))
                before = tight.stats()
                paged.append(timed(lambda pair=pair: at_once(tight, jobs, str(pair))))
            after = tight.stats()
        outputs = [[same(c) for c in result] for result, _, _ in static + paged]
        one_by_one = [same(complete([ample.submit(*job, cache_salt="alone")])[0]) for job in jobs[:alone]]
    least = COUNT * (prompt + new - 1)
    return {
        "ratio": spread([s / p for (_, s, _), (_, p, _) in zip(static, paged, strict=True)]),
        "ratio_of_cpu_time": spread([s / p for (_, _, s), (_, _, p) in zip(static, paged, strict=True)]),
        "tokens_per_s": COUNT * new / median(s for _, s, _ in paged),
        "tokens_per_s_of_batches": COUNT * new / median(s for _, s, _ in static),
        "preemptions": after.preemptions - before.preemptions,
        "recomputed_tokens": after.computed_tokens - before.computed_tokens - least,
        "least_tokens": least,
        "steps": after.steps - before.steps,
        "steps_of_batches": COUNT // CONCURRENT * new,
        "kv_blocks": room,
        "compared_with_alone": len(one_by_one),
        "differ_from_alone": differing([found[:alone] for found in outputs], one_by_one),
        "differ_from_batches": differing(outputs, outputs[0]),
    }


def draw(engine: Engine, rng: np.random.Generator, prompt: int, new: int) -> list[Job]:
    """Every other one is sampled."""
    greedy = fixed(new, logprobs=2)
    sampled = replace(greedy, temperature=0.8, top_p=0.95)
    return [
        (random_prompt(engine, rng, prompt), replace(sampled, seed=i) if i % 2 else greedy)
        for i in range(COUNT)
    ]


def batches(engine: Engine, jobs: Sequence[Job], salt: str) -> list[Completion]:
    """Each starts when the last one is done."""
    parts = [jobs[at : at + CONCURRENT] for at in range(0, len(jobs), CONCURRENT)]
    return [each for part in parts for each in at_once(engine, part, salt)]


def at_once(engine: Engine, jobs: Sequence[Job], salt: str) -> list[Completion]:
    return complete([engine.submit(*job, cache_salt=salt) for job in jobs])


def same(completion: Completion) -> tuple[Any, ...]:
    return completion.token_ids, completion.logprobs, completion.finish_reason


def differing(runs: Sequence[Sequence[Any]], expected: Sequence[Any]) -> int:
    return sum(a != b for found in runs for a, b in zip(found, expected, strict=True))
