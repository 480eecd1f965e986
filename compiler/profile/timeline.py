"""A recorded step: which thread ran which kernel when, and when it waited. Times are nanoseconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

WAIT, RESUME, END = -1, -2, -3  # as in the C ABI

Wait = tuple[int, int]


@dataclass(frozen=True)
class Span:
    """A kernel on one thread, until the next one begins: the waits in it and after it are its own."""

    kernel: int
    start: int
    end: int
    waits: tuple[Wait, ...]

    @property
    def idle(self) -> int:
        return sum(end - start for start, end in self.waits)


@dataclass(frozen=True)
class Timeline:
    """threads: each one's spans, in the order of `forward()`, which all begin and end together."""

    start: int
    end: int
    threads: tuple[tuple[Span, ...], ...]

    @staticmethod
    def of(marks: np.ndarray) -> Timeline:
        """From marks [threads, N, 2], zero where nothing was written. Raises ValueError on others."""
        lists = [[(int(ns), int(what)) for ns, what in thread if ns] for thread in marks]
        if not all(each and each[-1][1] == END for each in lists):
            raise ValueError("the marks of a step are not complete")
        start, end = min(each[0][0] for each in lists), max(each[-1][0] for each in lists)
        return Timeline(start, end, tuple(tuple(_spans(each, start, end)) for each in lists))

    @property
    def time_s(self) -> float:
        return (self.end - self.start) * 1e-9

    def kernel_s(self) -> tuple[list[float], list[float]]:
        """(time, idle part of it) of each kernel: means over the threads, so that they add up to the step."""
        times = np.array([[(s.end - s.start, s.idle) for s in spans] for spans in self.threads], float)
        means = times.mean(0) * 1e-9
        return means[:, 0].tolist(), means[:, 1].tolist()


def _spans(marks: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[Span]:
    """One thread's spans. The first begins and the last ends with the step: all threads' are as long."""
    begins = [i for i, (_, what) in enumerate(marks) if what >= 0]
    for number, (i, j) in enumerate(zip(begins, [*begins[1:], len(marks) - 1], strict=True)):
        first, last = number == 0, j == len(marks) - 1
        waits = [(marks[k][0], marks[k + 1][0]) for k in range(i + 1, j) if marks[k][1] == WAIT]
        if first and marks[i][0] > start:
            waits.insert(0, (start, marks[i][0]))
        if last and marks[j][0] < end:
            waits.append((marks[j][0], end))
        yield Span(marks[i][1], start if first else marks[i][0], end if last else marks[j][0], tuple(waits))
