"""What came of drafts: how many there were, how many were right, at which place, and what time that saved."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.completion import Drafts


@dataclass(slots=True)
class Tally:
    """Of one sample or of all. by_position: at each place of a draft how many were verified, and how many of
    these were right, with all before. plain_s: seconds that its tokens would have taken without drafts, as it
    is estimated, since the first draft; taken_s: that they took."""

    by_position: list[list[int]] = field(default_factory=list[list[int]])
    plain_s: float = 0.0
    taken_s: float = 0.0

    @property
    def drafted(self) -> int:
        return sum([drafted for drafted, _ in self.by_position])

    @property
    def accepted(self) -> int:
        return sum([accepted for _, accepted in self.by_position])

    @property
    def positions(self) -> tuple[tuple[int, int], ...]:
        return tuple((drafted, accepted) for drafted, accepted in self.by_position)

    def add(self, drafted: int, accepted: int) -> None:
        """Of one draft of so many tokens, the first so many of them accepted."""
        while len(self.by_position) < drafted:
            self.by_position.append([0, 0])
        for place in range(drafted):
            self.by_position[place][0] += 1
            self.by_position[place][1] += place < accepted

    def took(self, plain_s: float, taken_s: float) -> None:
        self.plain_s += plain_s
        self.taken_s += taken_s

    def frozen(self) -> Drafts:
        speedup = self.plain_s / self.taken_s if self.taken_s and self.plain_s else None
        return Drafts(self.drafted, self.accepted, self.positions, speedup)
