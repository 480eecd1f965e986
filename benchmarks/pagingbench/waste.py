"""KV slots that are allocated and not used, step by step, on a trace of 200 requests at full load.

Used is what holds a token's keys and values; a block that requests share counts once. Beside it: what one
contiguous piece per running request would have wasted at the same moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagingbench.engines import after_steps, complete, core, fixed, opened, random_prompt
from pagingbench.report import Bound, Report, spread
from pagingbench.trace import TRACE, Length, read
from runtime import Engine
from runtime.core import Core

MOST_WASTE = 0.04
BLOCKS = 192  # 3,072 tokens: requests wait for memory until most are done


@dataclass(frozen=True)
class Slots:
    """Of one group, after one step. whole, wanted: contiguous pieces of the context, and of what each asked
    for."""

    running: int
    waiting: int
    allocated: int
    used: int
    whole: int
    wanted: int

    @property
    def waste(self) -> float:
        return self.over(self.allocated)

    def over(self, allocated: int) -> float:
        return (allocated - self.used) / allocated


class Watch:
    """After every step in which anything is held, the slots of the first group, which must be a full one."""

    def __init__(self, context: int) -> None:
        self.context, self.found = context, list[Slots]()

    def __call__(self, core: Core) -> None:
        cache, seqs = core.scheduler.cache, [seq for seq in core.scheduler.running if seq.tables]
        pool, block = cache.pools[0], cache.block
        used: dict[int, int] = {}
        for seq in seqs:
            for index, held in enumerate(seq.tables[0].live()):
                used[held] = max(used.get(held, 0), min(block, max(0, seq.computed - index * block)))
        allocated = (pool.num_blocks - pool.num_free) * block
        if allocated:
            waiting, wanted = core.scheduler.num_waiting, sum(seq.max_tokens for seq in seqs)
            whole = len(seqs) * self.context
            self.found.append(Slots(len(seqs), waiting, allocated, sum(used.values()), whole, wanted))


def run(path: Path, trace: Path = TRACE, blocks: int = BLOCKS, seed: int = 0) -> Report:
    with opened(path, kv_blocks=blocks) as engine:
        return measure(engine, read(trace), seed)


def measure(engine: Engine, lengths: Sequence[Length], seed: int) -> Report:
    """All requests at once, random tokens; the mean over steps."""
    watch, rng = Watch(engine.model.max_context), np.random.default_rng(seed)
    after_steps(engine, watch)
    complete([engine.submit(random_prompt(engine, rng, each.prompt), fixed(each.output)) for each in lengths])
    core(engine).scheduler.check()
    bounds = [Bound("mean waste", float(np.mean([s.waste for s in watch.found])), MOST_WASTE)]
    return Report("waste", bounds, figures(watch.found) | {"preemptions": engine.stats().preemptions})


def figures(found: Sequence[Slots]) -> dict[str, Any]:
    """full: steps at which requests waited for memory or a place."""
    full = [s for s in found if s.waiting]
    return {
        "waste": spread([s.waste for s in found]),
        "mean waste while requests wait": float(np.mean([s.waste for s in full])) if full else None,
        "worst waste while requests wait": max((s.waste for s in full), default=None),
        "mean waste of contiguous pieces of the context": float(np.mean([s.over(s.whole) for s in found])),
        "mean waste of contiguous pieces of prompt and new tokens": float(
            np.mean([s.over(s.wanted) for s in found])
        ),
        "steps": len(found),
        "steps while requests wait": len(full),
        "running": spread([s.running for s in found]),
        "slots": spread([s.allocated for s in found]),
    }
