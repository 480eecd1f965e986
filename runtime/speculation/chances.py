"""How likely drafts are to be accepted, by their place in the draft, from those that were."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

FIRST = 0.7  # of a draft, after one that was accepted, when nothing was seen yet
OWN_MEMORY, ALL_MEMORY = 0.95, 0.99  # what an older draft weighs at each that comes after it at its place
TRUST = 4.0  # drafts that what is known of all requests weighs, beside a request's own
FORGET = 0.5  # of a request's own drafts, at each probe after it stopped drafting
SHORT, LONG, LONGER = 4, 512, 1.5  # steps between two probes, and how many times longer than before
UNLIKELY = 0.5  # a draft that is accepted although its chance was less is followed by a probe at once


@dataclass(slots=True)
class Counts:
    """Of drafts at each place: those that followed none or an accepted one, and those accepted."""

    memory: float
    reached: list[float]
    accepted: list[float]

    @staticmethod
    def none(places: int, memory: float) -> Counts:
        return Counts(memory, [0.0] * places, [0.0] * places)

    def add(self, drafted: int, accepted: int) -> None:
        """Of `drafted` in a row the first `accepted`. The one after them was refused; nobody knows of those
        behind it."""
        for place in range(min(drafted, accepted + 1, len(self.reached))):
            self.reached[place] = self.reached[place] * self.memory + 1
            self.accepted[place] = self.accepted[place] * self.memory + (place < accepted)

    def forget(self, share: float) -> None:
        """Have all so far weigh this share of what they do."""
        self.reached = [n * share for n in self.reached]
        self.accepted = [n * share for n in self.accepted]

    def share(self, place: int, prior: float, trust: float) -> float:
        """Accepted drafts of all at a place, with `trust` more of which this share was accepted."""
        return (self.accepted[place] + trust * prior) / (self.reached[place] + trust)


@dataclass(slots=True)
class Drafted:
    """What is known of one request. wait: steps until it is probed, where drafting does not pay; interval:
    those between two probes. probes: it is to be probed now."""

    counts: Counts
    wait: int = SHORT
    interval: int = SHORT
    probes: bool = False
    chances: list[float] | None = field(default=None, repr=False)

    def postpone(self) -> None:
        """Its next probe, by more than the last one."""
        self.interval = self.wait = min(max(SHORT, round(LONGER * self.interval)), LONG)


class Chances:
    """places: the longest draft."""

    def __init__(self, places: int) -> None:
        self._places = places
        self._all = Counts.none(places, ALL_MEMORY)
        self._requests: dict[Hashable, Drafted] = {}
        self._waiting = SHORT, SHORT  # of the last that has finished
        self.verified = 0  # drafts of several tokens each

    def request(self, key: Hashable) -> Drafted:
        """A new one waits for its probe as long as one that has finished would have."""
        found = self._requests.get(key)
        if found is None:
            wait, interval = self._waiting
            found = Drafted(Counts.none(self._places, OWN_MEMORY), wait, interval)
            self._requests[key] = found
        return found

    def forget(self, key: Hashable) -> None:
        """A request that has finished; it may be unknown."""
        found = self._requests.pop(key, None)
        if found is not None:
            self._waiting = found.wait, found.interval

    def of(self, request: Drafted) -> list[float]:
        """That the draft at each place is accepted, and with it all before."""
        if request.chances is None:
            request.chances, chance, usual = [], 1.0, FIRST
            for place in range(self._places):
                usual = self._all.share(place, usual, TRUST)  # where few came so far, as a place before
                chance *= request.counts.share(place, usual, TRUST)
                request.chances.append(chance)
        return request.chances

    def learn(self, key: Hashable, drafted: int, accepted: int) -> None:
        """Of `drafted` tokens in a row, one at least, the first `accepted` were right."""
        request = self.request(key)
        if request.probes:
            self._probed(request, accepted == drafted and self.of(request)[drafted - 1] < UNLIKELY)
        elif accepted == drafted:
            request.interval = max(SHORT, request.interval // 2)
        for counts in (request.counts, self._all):
            counts.add(drafted, accepted)
        request.chances = None
        self.verified += 1

    def _probed(self, request: Drafted, surprised: bool) -> None:
        request.counts.forget(FORGET)
        request.postpone()
        if surprised:
            request.interval = request.wait = 1
        request.probes = False
