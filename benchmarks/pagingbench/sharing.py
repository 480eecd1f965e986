"""A system prompt that requests share: how many copies of it they hold, and what a prefix hit saves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pagingbench.engines import after_steps, complete, core, fixed, opened, random_prompt
from pagingbench.report import Bound, Report, spread
from runtime import Engine
from runtime.core import Core

SYSTEM, USER, COUNT = 1_024, 32, 32  # tokens, tokens, requests
MOST_COPIES, MOST_SHARE = 1.1, 0.08
TURNS = 7


class Copies:
    """The most different blocks that stand for the first `blocks` of all running requests, over `blocks`."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.most, self.requests = blocks, 0.0, 0

    def __call__(self, core: Core) -> None:
        running = [seq for seq in core.scheduler.running if seq.tables]
        held = {block for seq in running for block in seq.tables[0].live()[: self.blocks]}
        self.most = max(self.most, len(held) / self.blocks)
        self.requests = max(self.requests, len(running))


def run(path: Path, turns: int = TURNS, seed: int = 0) -> Report:
    rng = np.random.default_rng(seed)
    with opened(path, kv_blocks=2 * (SYSTEM + COUNT * (USER + 16)) // 8) as engine:
        block = core(engine).scheduler.cache.block
        copies = Copies(SYSTEM // block)
        after_steps(engine, copies)
        system, found = random_prompt(engine, rng, SYSTEM), {}
        for name in ("cold", "warm"):
            copies.most = copies.requests = 0
            hits = submit_together(engine, rng, system)
            found[name] = {"copies": copies.most, "at once": copies.requests, "with a hit": hits}
        pairs = [first_tokens(engine, rng) for _ in range(turns)]
    share = spread([hit / cold for cold, hit in pairs])
    bounds = [Bound(f"copies, {name}", each["copies"], MOST_COPIES) for name, each in found.items()]
    bounds.append(Bound("time to first token with a hit, over cold", share["median"], MOST_SHARE))
    figures = {
        **found,
        "share": share,
        "cold_s": spread([cold for cold, _ in pairs]),
        "hit_s": spread([hit for _, hit in pairs]),
    }
    return Report("sharing", bounds, figures)


def submit_together(engine: Engine, rng: np.random.Generator, system: Sequence[int]) -> int:
    """How many of them found the whole system prompt."""
    requests = [
        engine.submit([*system, *random_prompt(engine, rng, USER)], fixed(8), prompt_index=i)
        for i in range(COUNT)
    ]
    return sum(each.cached_tokens >= SYSTEM // 16 * 16 for each in complete(requests))


def first_tokens(engine: Engine, rng: np.random.Generator) -> tuple[float, float]:
    """Seconds until the first token, of the first request with a system prompt and of a second one."""
    system, times = random_prompt(engine, rng, SYSTEM), []
    for _ in range(2):
        done = engine.submit([*system, *random_prompt(engine, rng, USER)], fixed(2)).result()
        assert done.timings.first_token_s is not None
        times.append(done.timings.first_token_s)
    assert done.cached_tokens == SYSTEM
    return times[0], times[1]
