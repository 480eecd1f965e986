"""Forks: what one of a long request costs the engine's thread and copies, and what samples of a prompt hold.

A fork's cost is what adding it takes, and planning and starting the copies of the steps until it is done.
"""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from pagingbench.engines import after_steps, core, fixed, opened, random_prompt
from pagingbench.report import Bound, Report, spread
from runtime import Engine, Sampling
from runtime.core import Core

LENGTH, FORKS = 2_000, 20
SAMPLES, NEW = 8, 64
PROMPTS = (512, 505)  # tokens: whole blocks, and a partial one that each sample copies
MOST_MS, MOST_COPIES, MOST_HELD = 1.0, 1, 1.3


class Spent:
    """Seconds inside some methods, summed until taken."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def watch(self, owner: Any, name: str) -> None:
        inner = getattr(owner, name)

        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(*args)
            finally:
                self.seconds += time.perf_counter() - start

        setattr(owner, name, timed)

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class Peak:
    """The most blocks of the first group that were held after a step."""

    def __init__(self) -> None:
        self.most = 0

    def __call__(self, core: Core) -> None:
        pool = core.scheduler.cache.pools[0]
        self.most = max(self.most, pool.num_blocks - pool.num_free)


def run(path: Path, forks: int = FORKS, seed: int = 0) -> Report:
    rng = np.random.default_rng(seed)
    with opened(path, kv_blocks=1_024) as engine:
        found = fork_long(engine, rng, forks)
        held = {str(length): samples(engine, rng, length) for length in PROMPTS}
    bounds = [
        Bound("block copies of a fork, per group", found["copies"]["max"], MOST_COPIES + 1),
        Bound("ms of the engine's thread, median", found["engine_ms"]["median"], MOST_MS),
    ]
    bounds += [
        Bound(f"{SAMPLES} samples of {length} tokens: (held - own) / the prompt's", each["share"], MOST_HELD)
        for length, each in held.items()
    ]
    return Report("forks", bounds, {f"fork of {LENGTH} tokens": found, "samples": held})


def fork_long(engine: Engine, rng: np.random.Generator, forks: int) -> dict[str, Any]:
    """Forks, one after the other, of a request that goes on."""
    inner, spent = core(engine), Spent()
    for owner, name in ((inner, "add"), (inner.scheduler.cache, "_copy_on_write"), (inner, "_move")):
        spent.watch(owner, name)
    parent = engine.submit(random_prompt(engine, rng, LENGTH - 8), fixed(8 + 20 * forks))
    for _ in islice(parent, 8):
        pass
    copies, engine_ms, submit_ms, cached = [], [], [], []
    for _ in range(forks):
        spent.take()
        before, start = engine.stats().copied_blocks, time.perf_counter()
        fork = parent.fork(Sampling(max_new_tokens=4, ignore_eos=True))
        submit_ms.append((time.perf_counter() - start) * 1e3)
        cached.append(fork.result().cached_tokens)
        engine_ms.append(spent.take() * 1e3)
        copies.append((engine.stats().copied_blocks - before) / len(inner.scheduler.cache.groups))
    assert not parent.done, "it ended before it was forked"
    parent.cancel()
    parent.results()
    found = {"copies": copies, "engine_ms": engine_ms, "submit_ms": submit_ms, "shared_tokens": cached}
    return {name: spread(values) for name, values in found.items()}


def samples(engine: Engine, rng: np.random.Generator, length: int) -> dict[str, Any]:
    """Blocks held at the peak beside those of the prompt, and of what each sample has beyond whole ones."""
    peak, inner = Peak(), core(engine)
    block, step = inner.scheduler.cache.block, inner.step
    after_steps(engine, peak)
    sampling = fixed(NEW, n=SAMPLES, temperature=1.0, seed=1)
    engine.submit(random_prompt(engine, rng, length), sampling, cache_salt=str(length)).results()
    inner.step = step
    prompt = -(-length // block)
    own = SAMPLES * (-(-(length + NEW - 1) // block) - length // block)
    return {"held": peak.most, "prompt": prompt, "own": own, "share": (peak.most - own) / prompt}
