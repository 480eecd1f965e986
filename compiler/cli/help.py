"""What --help says of a command: its docstring, with examples on lines of their own."""

from __future__ import annotations

import inspect
import re

_EXAMPLE = re.compile(r"([^\n]* \| )?octavo [a-z]+ [^\n]+")


def help_text(docstring: str | None) -> str:
    """A docstring as typer takes it: each paragraph filled, and examples kept as lines, as \\b asks it."""
    shown: list[str] = []
    for paragraph in inspect.cleandoc(docstring or "").split("\n\n"):
        if _EXAMPLE.fullmatch(paragraph) is None:
            shown.append(" ".join(paragraph.split("\n")))
        elif shown and shown[-1].startswith("\b"):
            shown[-1] += f"\n{paragraph}"
        else:
            shown.append(f"\b{paragraph}")
    return "\n\n".join(shown)
