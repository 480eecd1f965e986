"""The lengths of drafts that give the most tokens per second, where chances and times are known."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from runtime.speculation.costs import Costs

LEAST_CHANCES = (0.0, 0.2, 0.35, 0.5, 0.6, 0.7, 0.8, 0.9)  # below which no draft is made, in turn
WORTH, WORTH_MANY, MANY = 1.1, 1.5, 8  # tokens per second beside those without drafts, from which it is worth
# it: below, it may be an error of the times. Steps of more than MANY requests are mostly bound by arithmetic.


@dataclass(frozen=True, slots=True)
class Prices:
    """Times of the target's and the drafter's steps. share: of the target's, where no step of the drafter's
    was told."""

    target: Costs
    drafter: Costs
    share: float

    def step_s(self, samples: int, tokens: int, drafts: int) -> float:
        """A step of `samples` tokens and drafts. Prompts' tokens, which are those beyond samples, have to be
        computed in any case: the drafts cost what they make it longer by."""
        if tokens == samples:
            return self.target.at(samples + drafts)
        longer_s = self.target.at(tokens + drafts) - self.target.at(tokens)
        return self.target.at(samples) + longer_s

    def round_s(self, samples: int, requests: int) -> float:
        """A step of the drafter's, of one token for each of so many."""
        return self.drafter.at(requests) if self.drafter else self.share * self.target.at(samples)


def least_gain(samples: int) -> float:
    """Tokens per second beside those without drafts, from which drafts are worth it in a step that gives so
    many tokens."""
    return WORTH if samples <= MANY else WORTH_MANY


def best(chances: Seq[Seq[float]], samples: int, tokens: int, prices: Prices) -> tuple[list[int], float]:
    """The lengths, and what they give beside none: tokens per second over tokens per second.

    chances: of each request's drafts, falling; samples: tokens without drafts; tokens: that are computed
    then.
    Tried are all depths, each with the drafts whose chances are above one bound or another.
    """
    plain = samples / prices.step_s(samples, tokens, 0)
    lengths, top = [0] * len(chances), plain * least_gain(samples)
    for least in LEAST_CHANCES if len(chances) > 1 else (0.0,):
        for found, rate in _deeper(chances, least, samples, tokens, prices):
            if rate > top:
                lengths, top = found, rate
    return lengths, max(1.0, top / plain) if any(lengths) else 1.0


def most_gain(requests: int, most: int, samples: int, tokens: int, prices: Prices, room: int) -> float:
    """What drafts would give beside none if all were accepted. room: of them, in all."""
    plain, top = samples / prices.step_s(samples, tokens, 0), 1.0
    few = [1 << bit for bit in range(requests.bit_length()) if 1 << bit < requests]
    for drafts in (*few, *(requests * depth for depth in range(1, most + 1)), room):
        if 0 < drafts <= min(room, requests * most):
            drafter_s = -(-drafts // requests) * prices.round_s(samples, requests)
            rate = (samples + drafts) / (prices.step_s(samples, tokens, drafts) + drafter_s)
            top = max(top, rate / plain)
    return top


def _deeper(
    chances: Seq[Seq[float]], least: float, samples: int, tokens: int, prices: Prices
) -> Iterator[tuple[list[int], float]]:
    """Lengths with one more place each, of the drafts above the bound, and tokens per second."""
    lengths, given, drafter_s, place = [0] * len(chances), float(samples), 0.0, 0
    while going := [i for i, row in enumerate(chances) if place < len(row) and row[place] > least]:
        place += 1
        given += sum([chances[i][place - 1] for i in going])
        drafter_s += prices.round_s(samples, len(going))
        for i in going:
            lengths[i] = place
        drafts = sum(lengths)
        yield list(lengths), given / (prices.step_s(samples, tokens, drafts) + drafter_s)


def fitted(lengths: list[int], room: int) -> list[int]:
    """With `room` drafts in all, at most: the longest are cut, and then the last requests go without."""
    while sum(lengths) > room and max(lengths) > 1:
        longest = max(lengths)
        lengths = [min(length, longest - 1) for length in lengths]
    left = itertools.accumulate(lengths, initial=0)
    return [length if before + length <= room else 0 for length, before in zip(lengths, left, strict=False)]
