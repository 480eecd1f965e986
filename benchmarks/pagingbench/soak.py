"""Random load with injected faults: nothing leaks, nothing hangs, and what ends well is what it is alone.

Now and then, in rounds, the clients pause until all requests are done: then no block may be held, and the
scheduler's own check must pass. Of what ended since, some is run again, alone, on a second engine without
faults; outputs that were cut short must be the start of it.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pagingbench.clients import AsyncClients, Client, Shared, Sizes, start
from pagingbench.engines import core, opened
from pagingbench.faults import Faults, install
from pagingbench.report import Bound, Report
from runtime import Completion, Engine, Sampling

THREADS, TASKS = 6, 4
SIZES = Sizes(prompt=200, new=40, system=100)
ROUND_S = 60.0
HUNG_S = 120.0  # of load on one engine; a request that takes longer is lost
VERIFIED = 12  # of each round
MOST_RSS_MB, MOST_OBJECTS = 24.0, 0.05  # growth over the second half of the rounds; of objects, a share


@dataclass
class Round:
    """What is left when all is done."""

    rss_mb: float
    objects: int
    threads: int
    blocks_used: int
    compared: int
    differ: int


def run(path: Path, minutes: float, seed: int = 0) -> Report:
    """A small pool that preempts, with room on the host for some of what it does."""
    with opened(path, kv_blocks=40, max_step_tokens=128, max_requests=12, swap_memory="16MiB") as engine:
        with opened(path, kv_blocks=256, prefix_cache=False) as alone:
            faults = Faults(seed)
            install(engine, faults)
            return soak(engine, alone, faults, minutes * 60, min(ROUND_S, minutes * 6), SIZES, seed)


def soak(
    engine: Engine,
    alone: Engine,
    faults: Faults,
    seconds: float,
    round_s: float,
    sizes: Sizes,
    seed: int,
    verified: int = VERIFIED,
    hung_s: float = HUNG_S,
    enough: Callable[[], bool] = lambda: True,
) -> Report:
    """alone: an engine of the same model. faults: installed in the first. enough: if not, it goes on, for ten
    times the seconds at most."""
    rng = random.Random(seed)
    vocab = engine.model.vocab_size
    systems = [[rng.randrange(vocab) for _ in range(sizes.system)] for _ in range(3)]
    shared, rounds = Shared(engine, sizes, systems), list[Round]()
    targets = [Client(shared, seed * 1000 + i).run for i in range(THREADS)]
    threads = start([*targets, AsyncClients(shared, seed * 1000 + 500, TASKS).run])
    hung, began = 0, time.monotonic()
    while not hung and not shared.unexpected:
        spent = time.monotonic() - began
        if spent >= (seconds if enough() else 10 * seconds):
            break
        hung = _load(shared, round_s, hung_s)
        rounds.append(_round(engine, alone, shared, rng, verified))
    shared.end.set()
    for thread in threads:
        thread.join(10.0)
    return _report(engine, shared, faults, rounds, hung + sum(thread.is_alive() for thread in threads))


def _load(shared: Shared, seconds: float, hung_s: float) -> int:
    """Let the clients work, then wait until all is done. How many requests hang."""
    shared.pause.clear()
    end = time.monotonic() + seconds
    while time.monotonic() < end and not shared.unexpected:
        time.sleep(0.05)
        shared.settle()
    shared.pause.set()
    quiet, limit = 0, time.monotonic() + hung_s
    while quiet < 10 and time.monotonic() < limit and not shared.unexpected:
        time.sleep(0.05)
        shared.settle()
        quiet = 0 if shared.open or core(shared.engine).busy else quiet + 1
    return len(shared.open)


def _round(engine: Engine, alone: Engine, shared: Shared, rng: random.Random, verified: int) -> Round:
    chosen = rng.sample(shared.ended, min(verified, len(shared.ended)))
    shared.ended.clear()
    if not shared.open and not shared.unexpected:
        core(engine).scheduler.check()
    differ = sum(not is_as_alone(alone, *each) for each in chosen)
    compared = len(chosen)
    del chosen
    gc.collect()
    used = sum(engine.stats().blocks_used)
    return Round(rss_mb(), len(gc.get_objects()), threading.active_count(), used, compared, differ)


def is_as_alone(alone: Engine, sampling: Sampling, found: Completion) -> bool:
    """Whether it is what it should be, or the start of it where it was cut short."""
    prompt, whole = found.prompt_token_ids, replace(sampling, seed=found.seed)
    want = alone.submit(prompt, whole).results()[found.sample_index]
    if found.finish_reason in ("cancelled", "timeout"):
        count = len(found.token_ids)
        logprobs = want.logprobs and want.logprobs[:count]
        return found.token_ids == want.token_ids[:count] and (found.logprobs or None) == (logprobs or None)
    return _output(found) == _output(want)


def _output(completion: Completion) -> tuple[Any, ...]:
    c = completion
    return c.token_ids, c.text, c.finish_reason, c.logprobs, c.prompt_logprobs


def _report(engine: Engine, shared: Shared, faults: Faults, rounds: list[Round], hung: int) -> Report:
    late = rounds[len(rounds) // 2 :]
    objects = growth([float(r.objects) for r in late]) / max(1, late[0].objects)
    bounds = [
        Bound("requests and clients that hang", hung, 1),
        Bound("unexpected errors", len(shared.unexpected), 1),
        Bound("blocks held when idle", sum(r.blocks_used for r in rounds), 1),
        Bound("outputs that differ from alone", sum(r.differ for r in rounds), 1),
        Bound("growth of RSS, MB, second half", growth([r.rss_mb for r in late]), MOST_RSS_MB),
        Bound("growth of objects, second half, share", objects, MOST_OBJECTS),
        Bound("growth of threads", max(r.threads for r in late) - min(r.threads for r in late), 1),
    ]
    stats = engine.stats()
    figures = {
        "rounds": len(rounds),
        "outputs compared": sum(r.compared for r in rounds),
        "outcomes": dict(shared.outcomes),
        "faults": dict(faults.counts),
        "events": dict(core(engine).log.events),
        "steps": stats.steps,
        "tokens": stats.output_tokens,
        "rss_mb": [round(r.rss_mb, 1) for r in rounds],
        "objects": [r.objects for r in rounds],
        "unexpected": shared.unexpected[:5],
    }
    return Report("soak", bounds, figures)


def growth(values: list[float]) -> float:
    """What a straight line through the values rises by, from the first to the last; 0 of fewer than three."""
    if len(values) < 3:
        return 0.0
    return float(np.polyfit(np.arange(len(values)), values, 1)[0]) * (len(values) - 1)


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
