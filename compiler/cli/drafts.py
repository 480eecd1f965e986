"""What `octavo bench --draft` measures: runs with drafts and without, in turn, on one engine and the same
prompts."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from runtime.stats import Stats


class Run(Protocol):
    """Of the same prompts as its pair's other."""

    @property
    def decode_s(self) -> float: ...


@dataclass(frozen=True)
class Counts:
    """Of an engine's drafts: (drafted, accepted) at each place of a draft, and seconds in the drafter."""

    places: tuple[tuple[int, int], ...]
    verify_steps: int
    draft_s: float
    failures: int

    @staticmethod
    def of(stats: Stats) -> Counts:
        return Counts(stats.draft_positions, stats.verify_steps, stats.draft_s, stats.draft_failures)

    def since(self, before: Counts) -> Counts:
        then = (*before.places, *[(0, 0)] * (len(self.places) - len(before.places)))
        places = tuple((d - e, a - b) for (d, a), (e, b) in zip(self.places, then, strict=True))
        steps, draft_s = self.verify_steps - before.verify_steps, self.draft_s - before.draft_s
        return Counts(places, steps, draft_s, self.failures - before.failures)

    def figures(self) -> dict[str, Any]:
        drafted, accepted = (sum(place[i] for place in self.places) for i in (0, 1))
        return {
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "acceptance": accepted / drafted if drafted else None,
            "acceptance_by_position": [a / d for d, a in self.places if d],
            "verify_steps": self.verify_steps,
            "draft_s": self.draft_s,
            "draft_failures": self.failures,
        }


def speedup(plain: Sequence[Run], drafted: Sequence[Run]) -> dict[str, float]:
    """The median over pairs of how many times as fast the new tokens after the first ones came."""
    ratios = [without.decode_s / run.decode_s for without, run in zip(plain, drafted, strict=True)]
    return {"speedup": statistics.median(ratios), "speedup_least": min(ratios), "speedup_most": max(ratios)}
