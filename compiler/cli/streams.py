"""The standard streams as a command line needs them, and what libraries would write there of their own."""

from __future__ import annotations

import io
import logging
import os
import select
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# Control characters that a terminal would obey, but for newlines and tabs.
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])


def prepare() -> None:
    """Streams that were closed become empty ones; text that the terminal's encoding lacks is escaped."""
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def for_terminal(text: str) -> str:
    """A text that a model or a file holds: without what a terminal would obey, where stdout is one."""
    return text.translate(_CONTROLS) if sys.stdout.isatty() else text


def reader_is_gone() -> bool:
    """Whether stdout is a pipe that nobody reads any more."""
    with suppress(OSError, ValueError, AttributeError):
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return any(events & select.POLLERR for _, events in poll.poll(0))
    return False


def drop_stdout() -> None:
    """What is still to be written, at the latest when Python ends, goes nowhere."""
    with suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


@contextmanager
def quiet_libraries() -> Iterator[None]:
    """Within it, no library warns."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(max(before, logging.WARNING))
        try:
            yield
        finally:
            logging.disable(before)
