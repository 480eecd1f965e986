"""What the engine did to requests that they did not ask for: counted, and the last of it kept with causes."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from typing import Literal, NamedTuple

Kind = Literal[
    "prefix_hit", "fork", "copy_on_write", "evict", "preempt", "swap_out", "swap_in", "pin", "unpin",
    "cancelled", "timeout", "fail", "draft_failed",
]  # fmt: skip
COUNTS_TOKENS = ("prefix_hit", "fork", "cancelled", "timeout")  # the amounts of others are blocks
KEPT = 4096


class LogEntry(NamedTuple):
    """request, sample: which it happened to, by Request.number. amount: tokens of a prefix hit, of a fork,
    or of the output of what was ended; else blocks. cause: why, or for whom. str() is a line of it.
    """

    number: int  # counts all entries from 0 on
    time_s: float  # of time.monotonic(), as Request.submitted_s
    kind: Kind
    request: int
    sample: int
    amount: int
    cause: str

    def __str__(self) -> str:
        unit = ("token" if self.kind in COUNTS_TOKENS else "block") + "s" * (self.amount != 1)
        amount = f", {self.amount} {unit}" if self.kind not in ("fail", "draft_failed") else ""
        cause = f": {self.cause}" if self.cause else ""
        head = f"{self.number} at {self.time_s:.3f} s, request {self.request}, sample {self.sample}"
        return f"{head}: {self.kind}{amount}{cause}"


class Log:
    """Written by the engine's thread, read by any."""

    def __init__(self, kept: int = KEPT) -> None:
        self.events: Counter[str] = Counter()  # kind -> how often
        self.amounts: Counter[str] = Counter()  # kind -> sum of amounts
        self._entries: deque[LogEntry] = deque(maxlen=kept)
        self._lock = threading.Lock()
        self._number = 0

    def add(self, kind: Kind, owner: tuple[int, int], amount: int = 0, cause: str = "") -> None:
        """owner: the request's number and the sample's index."""
        entry = LogEntry(self._number, time.monotonic(), kind, *owner, amount, cause)
        self._number += 1
        self.events[kind] += 1
        self.amounts[kind] += amount
        with self._lock:
            self._entries.append(entry)

    def since(self, number: int = 0) -> list[LogEntry]:
        """The kept entries from one on, oldest first."""
        with self._lock:
            return [entry for entry in self._entries if entry.number >= number]
