"""The alternation: the machine's limits, one engine, the other, and again in the other order."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean

import numpy as np

from compiler.profile.limits import Limits
from sidebyside.worker import Turn, Worker
from sidebyside.workloads import Times, Workload


@dataclass(frozen=True)
class Pair:
    """Both engines on the same prompts, one right after the other."""

    limits: Limits  # of the machine, just before
    octavo: Times
    peer: Times


@dataclass(frozen=True)
class Pairs:
    pairs: list[Pair]
    agreement: float  # share of new tokens before the first that differs


def measure(
    workload: Workload,
    octavo: Worker,
    peer: Worker,
    num_pairs: int,
    rng: np.random.Generator,
    vocab_size: int,
) -> Pairs:
    """Warm both up and take turns."""
    context = workload.context(rng, vocab_size)

    def turns(workload: Workload, octavo_first: bool) -> tuple[Turn, Turn]:
        prompts = workload.prompts(rng, vocab_size)
        workers = (octavo, peer) if octavo_first else (peer, octavo)
        first, second = (worker.run(context, prompts, workload.new_tokens) for worker in workers)
        return (first, second) if octavo_first else (second, first)

    turns(workload.warm_up, True)
    pairs: list[Pair] = []
    agreements: list[float] = []
    for index in range(num_pairs):
        limits = Limits(**octavo.call("limits"))
        ours, theirs = turns(workload, index % 2 == 0)
        pairs.append(Pair(limits, ours.times, theirs.times))
        agreements += map(agreement, ours.tokens, theirs.tokens)
    return Pairs(pairs, fmean(agreements))


def agreement(ours: list[int], theirs: list[int]) -> float:
    """Share of the tokens before the first that differs."""
    same = [a == b for a, b in zip_longest(ours, theirs)] + [False]
    return same.index(False) / max(len(ours), len(theirs))
