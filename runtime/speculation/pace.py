"""How many tokens to draft for each request of a step: as many as give the most tokens per second.

What n requests give is n tokens and, of each draft, the chance that it is accepted with all before it. What
that takes is the target's step, longer by every draft, and as many steps of the drafter as the longest draft
has tokens. Both times, and the chances, are learned from the steps that ran.

Where no draft pays, none is made but for a probe at growing intervals, and hardly ever one where not even
drafts that are all accepted would pay. What drafting has lost lately is
counted, and past a bound nothing is drafted until time has gone by: however wrong the estimates, steps take
hardly a hundredth more, in the long run, than they would without.

There is no clock here and no chance: lengths follow from what is told.
"""

from __future__ import annotations

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from runtime.speculation.chances import LONG, Chances, Drafted
from runtime.speculation.costs import Costs
from runtime.speculation.lengths import MANY, Prices, best, fitted, least_gain, most_gain

COLD_DRAFTS, COLD_VERIFIED = 4, 8  # drafts of one request, at most, until so many were verified
GROWTH = 1.5  # no step is larger than the largest so far by more than this, or by COLD_DRAFTS
# Steps with drafts before one goes without, to see what that takes: the fewest, the most, and the share of
# the tokens that it may cost between them.
FRESH = 8, 128, 0.005
DEPTH, LEAK = 1.0, 0.005  # plain steps that may be lost at once, and the share of a loss that a step forgets
GAINED = 5.0  # plain steps of gain that count against later losses
HOLD = 4  # steps of the same requests that lengths stay for
ROWS = 4  # drafts, over which what one makes a step longer by is measured
PEEK, LIKELY = 12, 0.4  # steps with drafts, of which one tries a draft more where it is likely enough


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step found of one request's drafts. key: whatever names it, always the same."""

    key: Hashable
    drafted: int
    accepted: int


class Pace:
    """most: the longest draft. share: what a drafter's step takes of a target's, until one was told; 0 for a
    drafter that computes nothing.

    saved_s, spent_s: seconds that drafts have saved, as it is estimated, and that steps took.
    """

    def __init__(self, most: int, *, share: float = 0.3) -> None:
        self._most, self._share = most, share
        self._target, self._drafter = Costs(), Costs()
        self._chances = Chances(most)
        self._balance_s = 0.0  # gained by drafts lately, or lost
        self._since_plain = 0  # steps since the last without drafts
        self._fresh = FRESH[0]  # of them, until the next goes without
        self._asked: tuple[Seq[Hashable], Seq[int], int, bool] | None = None
        self._held: list[int] = []  # what was found when that was asked first
        self._left = 0  # times to give it again
        self._vain = 0  # steps in a row in which no draft could have paid
        self._gain = 1.0  # tokens per second with them, beside none
        self.saved_s, self.spent_s = 0.0, 0.0

    def lengths(self, keys: Seq[Hashable], most: Seq[int], samples: int, tokens: int) -> list[int]:
        """Tokens to draft for each of these requests, at most most[i], in a step that computes `tokens` and
        gives `samples` without drafts: one to each of these, and to others."""
        none, pure = [0] * len(keys), tokens == samples
        if not keys or not self._target or not samples:
            return none
        if pure and (not self._target.knows(samples) or self._since_plain >= self._fresh):
            return none
        if self._balance_s < -DEPTH * self._target.at(samples):
            return none
        if self._is_vain(len(keys), samples, tokens):
            return none
        requests = [self._chances.request(key) for key in keys]
        asked = keys, most, samples, pure
        if asked != self._asked or not self._left:
            self._asked, self._held = asked, self._find(requests, most, samples, tokens)
            self._left = HOLD if self._chances.verified > 2 * COLD_VERIFIED else 1
        self._left -= 1
        found = self._probe(requests, most, list(self._held), self._room(tokens))
        return self._peek(requests, most, found) if self._since_plain % PEEK == PEEK - 1 else found

    def learn(
        self,
        samples: int,
        tokens: int,
        seconds: float,
        draft_s: float = 0.0,
        verified: Seq[Verified] = (),
        setup_s: float = 0.0,
    ) -> None:
        """Of a step that ran. samples: tokens that it would have given without drafts. tokens: that it
        computed, drafts included. seconds: of it, without draft_s, which are the drafter's, and setup_s, in
        which that computed prompts: they were spent, but say nothing of whether to go on."""
        drafted, longest = sum([v.drafted for v in verified]), max([v.drafted for v in verified], default=0)
        pure = samples > 0 and tokens == samples + drafted
        self.spent_s += seconds + draft_s + setup_s
        self.saved_s -= setup_s
        self._balance_s *= 1 - LEAK
        if pure:
            self._target.learn(tokens, seconds)
            self._since_plain = self._since_plain + 1 if drafted else 0
        if samples and self._target and (drafted or draft_s):
            self._count(samples, drafted, sum([v.accepted for v in verified]), draft_s)
        if longest:
            self._drafter.learn(drafted / longest, draft_s / longest)
        for found in verified:
            self._chances.learn(found.key, found.drafted, found.accepted)

    def forget(self, key: Hashable) -> None:
        """A request that has finished."""
        self._chances.forget(key)
        self._left = 0

    def plain_s(self, samples: int) -> float | None:
        """What a step without drafts takes that gives so many tokens; None if no step was told."""
        return self._target.at(samples) if self._target and samples else None

    def least_chance(self, samples: int, requests: int) -> float:
        """That one more draft of a request is accepted with all before, for it to be worth its time: that in
        which as many tokens come elsewhere. samples: of the step without drafts; requests: that draft."""
        if not self._target:
            return 0.0
        plain_s, rows_s = self._target.at(samples), self._target.at(samples + ROWS) - self._target.at(samples)
        token_s = self._prices.round_s(samples, requests) / requests + rows_s / ROWS
        return self._gain * samples / plain_s * token_s

    @property
    def speedup(self) -> float | None:
        """What all steps so far would have taken without drafts over what they took, as it is estimated."""
        return (self.spent_s + self.saved_s) / self.spent_s if self.spent_s else None

    @property
    def _prices(self) -> Prices:
        return Prices(self._target, self._drafter, self._share)

    def _find(self, requests: Seq[Drafted], most: Seq[int], samples: int, tokens: int) -> list[int]:
        cap = self._most if self._chances.verified >= COLD_VERIFIED else COLD_DRAFTS
        chances = [self._chances.of(r)[: min(m, cap)] for r, m in zip(requests, most, strict=True)]
        lengths, self._gain = best(chances, samples, tokens, self._prices)
        low, high, share = FRESH
        self._fresh = min(max(low, int((self._gain - 1) / share)), high)
        return fitted(lengths, self._room(tokens))

    def _is_vain(self, requests: int, samples: int, tokens: int) -> bool:
        """Whether not even drafts that are all accepted would pay, as far as times are known; not so once in
        a while, for they may be wrong."""
        if not self._target.knows_more(samples):
            return False
        gain = most_gain(requests, self._most, samples, tokens, self._prices, self._room(tokens))
        self._vain = self._vain + 1 if gain < least_gain(samples) else 0
        return self._vain % LONG > 0

    def _room(self, tokens: int) -> int:
        """Drafts beside so many tokens in a step that is not much larger than all so far."""
        return int(max(COLD_DRAFTS, GROWTH * self._target.largest - tokens))

    def _count(self, samples: int, drafted: int, accepted: int, draft_s: float) -> None:
        """What a step's drafts gained or lost, by what such steps take: one may be slow for other reasons."""
        plain_s = self._target.at(samples)
        longer_s = self._target.at(samples + drafted) - plain_s
        gain_s = accepted * plain_s / samples - longer_s - draft_s
        self.saved_s += gain_s
        self._balance_s = min(self._balance_s + gain_s, GAINED * plain_s)

    def _probe(self, requests: Seq[Drafted], most: Seq[int], found: list[int], room: int) -> list[int]:
        """The lengths found, and a draft of one token for a few without any whose time has come; for all of
        them, if none of a few requests has any: it also tells what drafts cost."""
        idle = [i for i, length in enumerate(most) if length and not found[i]]
        for i in idle:
            requests[i].wait -= 1
        due = [i for i in idle if requests[i].wait <= 0]
        due.sort(key=lambda i: (-requests[i].wait, requests[i].counts.reached[0]))  # some never get a draft
        all_at_once = len(idle) == len(found) <= MANY
        probed = set(due[: room if all_at_once else max(1, len(requests) // 8)])
        for i, request in enumerate(requests):
            request.probes = i in probed
            found[i] += request.probes
        for i in due:
            if requests[i].wait == 0 and i not in probed:
                requests[i].postpone()
        return found

    def _peek(self, requests: Seq[Drafted], most: Seq[int], found: list[int]) -> list[int]:
        """One draft more of those that have some: what that takes may have been judged by one odd time."""
        for i, (request, length) in enumerate(zip(requests, found, strict=True)):
            if 0 < length < min(most[i], self._most) and not request.probes:
                found[i] += self._chances.of(request)[length] > LIKELY
        return found
