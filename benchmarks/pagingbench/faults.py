"""Faults put into an engine: its executor, its tokenizer and its cache fail now and then."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from pagingbench.engines import core
from runtime import Engine, EngineError
from runtime.executor import Executor, Logits, SampleArgs, Sampled
from runtime.step import Step

# How often each happens, of the calls in which it can.
RATES = {
    "forward": 0.004, "nan": 0.004, "sample": 0.004, "logprobs": 0.01, "copy": 0.03, "swap_out": 0.03,
    "swap_in": 0.05, "encode": 0.02, "push": 0.0005, "flush": 0.005, "extend": 0.01, "admit": 0.05,
    "restore": 0.05, "fork": 0.05,
}  # fmt: skip

Spoil = Callable[[Any, Logits, int], None]


class Injected(EngineError):
    """What a fault raises."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"injected fault {kind}", where="soak", todo="Nothing is wrong")


class Faults:
    """rates: of each kind; 0 while `active` is not set. counts: how often each has happened."""

    def __init__(self, seed: int, rates: dict[str, float] | None = None) -> None:
        self._rng, self._rates = random.Random(seed), RATES | (rates or {})
        self.counts: Counter[str] = Counter()
        self.active = True

    def strike(self, kind: str) -> bool:
        if not self.active or self._rng.random() >= self._rates[kind]:
            return False
        self.counts[kind] += 1
        return True

    def maybe_raise(self, kind: str) -> None:
        if self.strike(kind):
            raise Injected(kind)

    def around(self, kind: str, call: Callable[[], Any]) -> Any:
        """Raise before the call or after it."""
        if not self.strike(kind):
            return call()
        if self._rng.random() < 0.5:
            call()
        raise Injected(kind)

    def below(self, count: int) -> int:
        return self._rng.randrange(count)


def spoil_row(_: Any, logits: Logits, row: int) -> None:
    logits[row] = np.nan


class FaultyExecutor:
    """An executor that fails. spoil: writes a NaN into a row of logits."""

    def __init__(self, inner: Executor, faults: Faults, spoil: Spoil) -> None:
        self._inner, self._faults, self._spoil = inner, faults, spoil

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def forward(self, step: Step) -> Logits:
        logits = self._faults.around("forward", lambda: self._inner.forward(step))
        if len(logits) and self._faults.strike("nan"):
            self._spoil(self._inner, logits, self._faults.below(len(logits)))
        return logits

    def sample(self, logits: Logits, args: SampleArgs) -> Sampled:
        return self._faults.around("sample", lambda: self._inner.sample(logits, args))

    def logprobs(self, logits: Logits, ids: np.ndarray) -> np.ndarray:
        return self._faults.around("logprobs", lambda: self._inner.logprobs(logits, ids))

    def copy_blocks(self, group: int, pairs: np.ndarray) -> None:
        self._faults.around("copy", lambda: self._inner.copy_blocks(group, pairs))

    def swap_out(self, group: int, pairs: np.ndarray) -> None:
        self._faults.around("swap_out", lambda: self._inner.swap_out(group, pairs))

    def swap_in(self, group: int, pairs: np.ndarray) -> None:
        self._faults.around("swap_in", lambda: self._inner.swap_in(group, pairs))


class FaultyDetokenizer:
    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def push(self, token_id: int) -> str:
        self._faults.maybe_raise("push")
        return self._inner.push(token_id)

    def flush(self) -> str:
        self._faults.maybe_raise("flush")
        return self._inner.flush()


class FaultyTokenizer:
    def __init__(self, inner: Any, faults: Faults) -> None:
        self._inner, self._faults = inner, faults

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def encode(self, text: str, **options: Any) -> list[int]:
        self._faults.maybe_raise("encode")
        return self._inner.encode(text, **options)

    def detokenizer(self) -> FaultyDetokenizer:
        return FaultyDetokenizer(self._inner.detokenizer(), self._faults)


def install(engine: Engine, faults: Faults, spoil: Spoil = spoil_row) -> None:
    """Before the first request."""
    inner: Any = core(engine)
    inner.executor = inner._sampler._executor = FaultyExecutor(inner.executor, faults, spoil)
    if engine.tokenizer is not None:
        faulty: Any = FaultyTokenizer(engine.tokenizer, faults)
        engine.tokenizer = faulty
    _refuse_blocks(engine, faults)


def _refuse_blocks(engine: Engine, faults: Faults) -> None:
    """As if blocks were out: to all but the first that runs, who must always go on."""
    scheduler = core(engine).scheduler

    def refusing(kind: str, call: Callable[..., bool]) -> Callable[..., bool]:
        def refuse(seq: Any, *rest: Any) -> bool:
            running = scheduler.running
            spared = not running or seq in running[0].peers
            return False if not spared and faults.strike(kind) else call(seq, *rest)

        return refuse

    cache, swap = scheduler.cache, scheduler.swap
    cache.extend = refusing("extend", cache.extend)
    cache.admit = refusing("admit", cache.admit)
    cache.fork = refusing("fork", cache.fork)
    swap.restore = refusing("restore", swap.restore)
