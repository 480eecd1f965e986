"""What is measured, and the figures that come of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class Times:
    """Of one turn, in seconds since submission."""

    first_s: float  # when every request has its first new token
    end_s: float


@dataclass(frozen=True)
class Workload:
    name: str
    title: str
    num_requests: int
    context_tokens: int  # computed before the clock starts, the same in every turn
    prompt_tokens: int  # per request, new in every turn
    new_tokens: int  # per request, at least 2
    figures: tuple[str, ...]  # those of `rates` that are compared

    def rates(self, times: Times) -> dict[str, float]:
        """Tokens per second.

        prefill: prompt tokens until every request has its first new token; decode: of one request, the
        others after it; output: all new tokens over the whole turn.
        """
        rates = {
            "prefill": self.num_requests * self.prompt_tokens / times.first_s,
            "output": self.num_requests * self.new_tokens / times.end_s,
        }
        if self.num_requests == 1:
            rates["decode"] = (self.new_tokens - 1) / (times.end_s - times.first_s)
        return rates

    def prompts(self, rng: np.random.Generator, vocab_size: int) -> list[list[int]]:
        return rng.integers(0, vocab_size, (self.num_requests, self.prompt_tokens)).tolist()

    def context(self, rng: np.random.Generator, vocab_size: int) -> list[int]:
        return rng.integers(0, vocab_size, self.context_tokens).tolist()

    @property
    def warm_up(self) -> Workload:
        return replace(self, new_tokens=min(self.new_tokens, 16))


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("one", "1 request, 128 in, 128 out", 1, 0, 128, 128, ("decode", "output")),
        Workload("prefill", "1 request, 512 in", 1, 0, 512, 2, ("prefill",)),
        Workload("long", "4,096 of context, the last 512 new", 1, 3584, 512, 32, ("prefill", "decode")),
        Workload("sixteen", "16 requests, 128 in, 128 out", 16, 0, 128, 128, ("output",)),
    )
}
