"""What a load shows while it checks a large artifact: a bar, on a terminal, once it takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONG_S = 2.0


@contextmanager
def loading() -> Iterator[Callable[[int, int], None] | None]:
    """What load() takes as `report`; None where there is no terminal to show anything on."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console

    from compiler.cli.terminal import Bar

    bar, since = Bar(Console(stderr=True, highlight=False)), time.perf_counter()

    def report(done: int, total: int) -> None:
        if not bar.is_started and time.perf_counter() - since >= LONG_S:
            bar.start("checking the artifact", "MB", since)
        bar.advance(done, total)

    try:
        yield report
    finally:
        bar.stop()
