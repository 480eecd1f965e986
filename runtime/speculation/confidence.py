"""How likely a model's draft is to be accepted, by how sure the model was of it.

A draft that its model was hardly sure of is seldom right, and nothing after it is either: drafting ends where
another token is not worth its time. What a degree of sureness means is learned from what was accepted.
"""

from __future__ import annotations

import math
from bisect import bisect_right

from runtime.sequence import Sequence

DEGREES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.96, 0.99)  # probabilities; between two, drafts are alike
TRUST = 8.0  # drafts that the probability itself weighs, beside those of its degree
MEMORY = 0.99  # what an older draft weighs at each of its degree that comes after it
USUAL = 0.75  # the chance of the draft to come, of which nothing is known yet


class Confidence:
    """least: that all drafts so far and the next one are accepted, for which that is still made; 0: always.
    Set by the engine before each draft."""

    def __init__(self) -> None:
        self.least = 0.0
        self._reached = [0.0] * (len(DEGREES) + 1)
        self._accepted = [0.0] * (len(DEGREES) + 1)
        self._drafts: dict[Sequence, list[int]] = {}  # degrees of those that are not verified yet
        self._chances: dict[Sequence, float] = {}

    def begin(self) -> None:
        """Before the drafts of a step."""
        self._drafts.clear()
        self._chances.clear()

    def goes_on(self, seq: Sequence, logprob: float) -> bool:
        """Whether to draft another token after one that has this log-probability."""
        probability = math.exp(logprob)
        degree = bisect_right(DEGREES, probability)
        self._drafts.setdefault(seq, []).append(degree)
        chance = (self._accepted[degree] + TRUST * probability) / (self._reached[degree] + TRUST)
        self._chances[seq] = self._chances.get(seq, 1.0) * chance
        return self._chances[seq] * USUAL >= self.least

    def settle(self, seq: Sequence, accepted: int) -> None:
        """The first so many of its drafts were right; of those after the one that was not, nobody knows."""
        for place, degree in enumerate(self._drafts.pop(seq, [])[: accepted + 1]):
            self._reached[degree] = self._reached[degree] * MEMORY + 1
            self._accepted[degree] = self._accepted[degree] * MEMORY + (place < accepted)
