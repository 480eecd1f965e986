"""What a step takes by its number of tokens, learned from the steps that ran.

Times are kept by size. What all of them have in common, a machine that is shared or a context that grows, is
a factor of its own: it moves with every step that is told, so that sizes which did not run lately stay right.
Between sizes lie straight lines. A size that ran seldom, or long ago, is moved towards a line through its
neighbours; one that runs often keeps its own time, for steps leap where another tile of rows begins.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass

EXACT = 16  # sizes up to this are kept apart, larger ones in groups a twelfth wide
SPEED_RATE, TIME_RATE = 0.15, 0.05  # how fast a new time moves what is common, and what its own size took
TICK_S = 1e-9  # what a step takes at least: a clock may show none
OUTLIER = 1.15  # one time moves them as if it were at most so many times what was expected, or as much less:
# slow steps are far slower than fast ones are faster, and say little of the others
NEAR = 0.1  # sizes that differ by this share count half as much in a size's line
SLOPE = 0.04  # of a step's time that a token more takes, until sizes differ enough to tell
TRUST = 2.0  # what that weighs: squared distances in tokens of steps from their mean
REDRAW = 8  # times told after which the lines are drawn anew
FADE = 0.96  # what a size's times weigh then, of what they did
OWN = 4.0  # times of a size's own that weigh as much as the line
LARGER = 1.1  # times as many tokens, from which a size tells what more of them cost


@dataclass(slots=True)
class Size:
    """Steps of about so many tokens. time_s: without what is common. weight: of its times in a line."""

    tokens: float
    time_s: float
    count: int = 1
    weight: float = 1.0


class Costs:
    """Seconds of a step."""

    def __init__(self) -> None:
        self._sizes: dict[int, Size] = {}
        self._speed = 1.0
        self._at: list[float] = []  # the line's corners: tokens, and seconds
        self._at_s: list[float] = []
        self._slopes: list[float] = [0.0, 0.0]  # before the first corner, and after the last
        self._told = 0  # since it was drawn

    def __bool__(self) -> bool:
        return bool(self._sizes)

    @property
    def largest(self) -> float:
        """Tokens of the largest step; one must have been told."""
        return max(size.tokens for size in self._sizes.values())

    def learn(self, tokens: float, seconds: float) -> None:
        """Of a step that ran, of one token at least."""
        size, seconds = self._sizes.get(_index(tokens)), max(seconds, TICK_S)
        self._told += 1
        if size is None:
            self._sizes[_index(tokens)] = Size(tokens, seconds / self._speed)
            self._at = []
            return
        off = min(max(seconds / (size.time_s * self._speed), 2 - OUTLIER), OUTLIER) - 1
        size.count, size.weight = size.count + 1, min(size.weight + 1, 1 / TIME_RATE)
        size.tokens += (tokens - size.tokens) / size.count
        size.time_s *= 1 + off * max(TIME_RATE, 1 / size.count)
        self._speed *= 1 + off * SPEED_RATE

    def knows(self, tokens: float) -> bool:
        """Whether steps of this size ran, and not once only."""
        size = self._sizes.get(_index(tokens))
        return size is not None and size.count > 1

    def knows_more(self, tokens: float) -> bool:
        """Whether steps of a larger size ran, and not once only."""
        return any(size.count > 1 and size.tokens >= LARGER * tokens for size in self._sizes.values())

    def at(self, tokens: float) -> float:
        """Seconds of a step of so many tokens. One must have been told."""
        if not self._at or self._told >= REDRAW:
            self._draw()
        i = bisect_left(self._at, tokens)
        if 0 < i < len(self._at):
            share = (tokens - self._at[i - 1]) / (self._at[i] - self._at[i - 1])
            found = self._at_s[i - 1] + share * (self._at_s[i] - self._at_s[i - 1])
        else:
            i = 0 if i == 0 else -1
            found = self._at_s[i] + (tokens - self._at[i]) * self._slopes[i]
        return found * self._speed

    def _draw(self) -> None:
        sizes = sorted(self._sizes.values(), key=lambda size: size.tokens)
        lines = [_line(size.tokens, sizes) for size in sizes]
        self._at = [size.tokens for size in sizes]
        self._at_s = [_settled(size, time_s) for size, (time_s, _) in zip(sizes, lines, strict=True)]
        self._slopes, self._told = [lines[0][1], lines[-1][1]], 0
        for size in sizes:
            size.weight *= FADE


def _line(tokens: float, sizes: list[Size]) -> tuple[float, float]:
    """Seconds at a size and seconds per token there, of the line that fits what lies near best. It neither
    falls nor meets zero above no tokens."""
    seen = [(_weight(size, tokens), size.tokens, size.time_s) for size in sizes]
    total = sum([w for w, _, _ in seen])
    mean, mean_s = sum([w * t for w, t, _ in seen]) / total, sum([w * s for w, _, s in seen]) / total
    square, cross = TRUST, TRUST * SLOPE * mean_s
    for w, t, s in seen:
        square += w * (t - mean) * (t - mean)
        cross += w * (t - mean) * (s - mean_s)
    slope_s = min(max(0.0, cross / square), mean_s / mean)
    return mean_s + (tokens - mean) * slope_s, slope_s


def _settled(size: Size, line_s: float) -> float:
    """Between the size's own time and the line's."""
    return line_s + (size.time_s - line_s) * size.weight / (size.weight + OWN)


def _weight(size: Size, tokens: float) -> float:
    off = (max(size.tokens / tokens, tokens / size.tokens) - 1) / NEAR
    return size.weight / (1 + off * off)


def _index(tokens: float) -> int:
    return round(tokens) if tokens <= EXACT else EXACT + round(8 * math.log2(tokens / EXACT))
