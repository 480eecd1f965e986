"""Where tables for people are printed: names in them are text, whatever they hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

LEAST = 60  # columns: with fewer nothing is left of a table, and the terminal breaks lines itself


def console(piped: int = 80) -> Console:
    """piped: columns where standard output is no terminal."""
    from rich.console import Console

    found = Console(markup=False, emoji=False)
    width = max(LEAST, found.width) if found.is_terminal else piped
    return Console(markup=False, emoji=False, width=width)
