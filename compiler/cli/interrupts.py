"""Signals that end a command: what was half written is removed first, and nothing interrupts that.

SIGINT (Ctrl-C), SIGTERM and SIGHUP raise KeyboardInterrupt in the main thread, wherever it is. Cleaning up
happens in `__exit__`s: one of ours that runs is not interrupted, nor is any once the first signal has come.
An interrupt that a library swallows is raised again at the next stage (`check`), or a moment later where
Python had to drop it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
AGAIN_AFTER_S = 0.05


class Interrupts:
    """A context. whole: functions that run to their end, whatever comes."""

    def __init__(self, whole: tuple[CodeType, ...] = ()) -> None:
        self.signum: int | None = None  # the first that came
        self._whole = whole
        self._before: dict[int, Any] = {}
        self._unraisable = sys.unraisablehook

    def __enter__(self) -> Interrupts:
        self._unraisable = sys.unraisablehook
        sys.unraisablehook = self._dropped
        for signum in SIGNALS:
            before = signal.getsignal(signum)
            if signum != signal.SIGHUP or before is not signal.SIG_IGN:  # nohup means it
                self._before[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *error: object) -> None:
        for signum, before in self._before.items():
            signal.signal(signum, before)
        sys.unraisablehook = self._unraisable

    def check(self) -> None:
        """Raises KeyboardInterrupt where one came and was swallowed."""
        if self.signum is not None:
            raise KeyboardInterrupt

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        first = self.signum is None
        self.signum = self.signum or signum
        if not any(self._is_whole(code, first) for code in _codes(frame)):
            raise KeyboardInterrupt

    def _is_whole(self, code: CodeType, first: bool) -> bool:
        return code in self._whole or (not first and code.co_name == "__exit__")

    def _dropped(self, unraisable: Any) -> None:
        """Python cannot raise what a finalizer or a callback raises."""
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            self._unraisable(unraisable)
        elif self.signum is not None:
            threading.Timer(AGAIN_AFTER_S, os.kill, (os.getpid(), self.signum)).start()


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        yield frame.f_code
        frame = frame.f_back
