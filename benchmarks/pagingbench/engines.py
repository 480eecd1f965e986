"""Engines as measurements use them: opened, watched step by step, and asked in groups of requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runtime import Completion, Engine, Sampling, load
from runtime.core import Core
from runtime.request import Request

DEMO = Path(__file__).parents[2] / "build" / "smollm2.octavo"


def opened(path: Path, **options: Any) -> Engine:
    """Loaded, and with its weights where they stay: a copy of them takes seconds of one core."""
    engine = load(path, verify="fast", **options)
    mover = getattr(core(engine).executor, "_mover", None)
    if mover is not None and mover.ident is not None:
        mover.join()
    return engine


def core(engine: Engine) -> Core:
    """What the engine's thread drives. Others may only look, or look on from a step (after_steps)."""
    return engine._core


def after_steps(engine: Engine, watch: Callable[[Core], None]) -> None:
    """Call watch in the engine's thread after each step from the next one on. Do so while it is idle."""
    inner = core(engine)
    step = inner.step

    def watched() -> bool:
        stepped = step()
        watch(inner)
        return stepped

    inner.step = watched


def random_prompt(engine: Engine, rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, engine.model.vocab_size, length).tolist()


def fixed(new_tokens: int, **more: Any) -> Sampling:
    """So many tokens, whatever they are."""
    return Sampling(max_new_tokens=new_tokens, ignore_eos=True, **more)


def complete(requests: Sequence[Request]) -> list[Completion]:
    return [completion for request in requests for completion in request.results()]


def timed(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """The result, seconds by the clock, and seconds of all threads of the process."""
    start, cpu = time.monotonic(), time.process_time()
    result = work()
    return result, time.monotonic() - start, time.process_time() - cpu
