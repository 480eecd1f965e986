"""Beam search itself: which beams go on, which texts are finished, and when none better can come.

The rules are those of transformers' `generate(num_beams=...)`, of version 5: of all continuations of all live
beams, those that end among the first `beams` are finished, and the first `beams` that do not end go on. The
first step has one beam, the prompt. A finished text's score is the sum of its log-probabilities over
length**length_penalty, its end token included; the best `beams` are kept. The search is over once they are
that many and no live beam can beat the worst of them: early_stopping=True takes that for granted, False
supposes that the best live beam ended here, "never" (where longer is better) that it went on to the end
without losing any more. At max_length whatever comes first is finished.

Sums are in float64, and ties go to the better parent, then to the lower token id.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from runtime.completion import TokenLogprob

EarlyStopping = bool | Literal["never"]
Row = Seq[tuple[int, float]]  # a beam's likeliest next tokens and their log-probabilities, best first


@dataclass(frozen=True, slots=True, eq=False)
class Beam:
    """What continues another beam by a token; the prompt is the one without. total: of log-probabilities."""

    parent: Beam | None = field(default=None, repr=False)
    token: TokenLogprob | None = None
    total: float = 0.0
    length: int = 0

    def tokens(self) -> list[TokenLogprob]:
        """All of its tokens, the first one first."""
        found: list[TokenLogprob] = []
        beam: Beam | None = self
        while beam is not None and beam.token is not None:
            found.append(beam.token)
            beam = beam.parent
        return found[::-1]


class Scored(NamedTuple):
    score: float
    beam: Beam


class BeamSearch:
    """The search for one prompt.

    ends: end tokens. max_length: tokens of the longest text. alternatives: how many of its row's tokens each
    chosen one reports. live: best first, as many as `beams` from the first step on. finished: best first.
    """

    def __init__(
        self,
        beams: int,
        ends: Collection[int],
        max_length: int,
        *,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        alternatives: int = 0,
    ) -> None:
        self.beams, self._ends, self._max_length = beams, frozenset(ends), max_length
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self._alternatives = alternatives
        self.live = [Beam()]
        self.finished: list[Scored] = []
        self.done = False

    @property
    def width(self) -> int:
        """The longest row that can matter: `beams` that go on, after all end tokens."""
        return self.beams + len(self._ends)

    def step(self, rows: Seq[Row]) -> list[int]:
        """Go on by one token. rows: of each live beam its `width` likeliest tokens.

        Returns the place among the live beams that each new one's parent had; nothing once it is done.
        """
        best = self._best(rows)
        length = self.live[0].length + 1
        full = length == self._max_length
        ending = [c for c in best[: self.beams] if full or c[2] in self._ends]
        going = [] if full else [c for c in best if c[2] not in self._ends][: self.beams]
        scored = [self._scored(self._child(rows, *c)) for c in ending]
        self.finished = sorted([*self.finished, *scored], key=lambda s: -s.score)[: self.beams]
        self.done = not going or self._settled(going[0][0], length)
        if self.done:
            return []
        self.live = [self._child(rows, *c) for c in going]
        return [parent for _, parent, _, _ in going]

    def outcome(self) -> list[Scored]:
        """The best texts: finished ones and, before it is done, live ones as if they ended here."""
        live = [self._scored(beam) for beam in self.live if not self.done and beam.length]
        return sorted([*self.finished, *live], key=lambda s: -s.score)[: self.beams]

    def _best(self, rows: Seq[Row]) -> list[tuple[float, int, int, int]]:
        """(total, parent, token id, place in its row) of all continuations that can matter, best first."""
        found = [
            (beam.total + logprob, parent, token_id, place)
            for parent, (beam, row) in enumerate(zip(self.live, rows, strict=True))
            for place, (token_id, logprob) in enumerate(row[: self.width])
        ]
        return sorted(found, key=lambda c: (-c[0], c[1], c[2]))

    def _child(self, rows: Seq[Row], total: float, parent: int, token_id: int, place: int) -> Beam:
        row, beam = rows[parent], self.live[parent]
        token = TokenLogprob(token_id, row[place][1], tuple(row[: self._alternatives]))
        return Beam(beam, token, total, beam.length + 1)

    def _scored(self, beam: Beam) -> Scored:
        return Scored(self._score(beam.total, beam.length), beam)

    def _score(self, total: float, length: int) -> float:
        return total / length**self._length_penalty

    def _settled(self, best_total: float, length: int) -> bool:
        """Whether no live beam, of which the best has this sum, is expected to change the outcome."""
        if len(self.finished) < self.beams:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_length
        return self._score(best_total, length) <= self.finished[-1].score
