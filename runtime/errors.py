"""What can go wrong at run time, said so that a user can act on it."""

from __future__ import annotations

import operator
from typing import Any

MAX_PART = 4000  # characters of a message's what, where and todo: names in files may be long


class OctavoError(Exception):
    """The base of every error that a user can cause.

    what: the fault, with the offending value. where: the file, field, or request. todo: what to do next.
    """

    def __init__(self, what: str, *, where: str = "", todo: str = "") -> None:
        self.what, self.where, self.todo = what, where, todo
        super().__init__(what, where, todo)

    def __str__(self) -> str:
        what, where, todo = (shorten(printable(t), MAX_PART) for t in (self.what, self.where, self.todo))
        head = f"{where}: {what}" if where else what
        return f"{head}. {todo}." if todo else head


class ArtifactError(OctavoError):
    """An artifact that is damaged, unsafe, of another version, or not for this machine."""


class RequestError(OctavoError, ValueError):
    """A prompt or a parameter that cannot be served. No other request is touched."""


class ResourceError(OctavoError):
    """Memory, threads or KV blocks that this machine or this engine does not have."""


class EngineError(OctavoError):
    """The engine is closed, or its compiled code reported a failure."""


def shorten(text: str, most: int = 60) -> str:
    """The text, cut to a length that fits a message."""
    return text if len(text) <= most else text[: most - 3] + "..."


def printable(text: str) -> str:
    """The text with an escape for what is not printed as it is, such as a terminal's commands; lines stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """The same in a line."""
    return printable(text).replace("\n", "\\n")


def shown(value: Any, most: int = 60) -> str:
    """A value from a file, in a length that fits a message."""
    try:
        return shorten(repr(value), most)
    except (RecursionError, ValueError):  # nested too deep; an integer of too many digits
        return f"a {type(value).__name__} that is too large to be shown"


def check_index(name: str, value: Any, last: int) -> int:
    """Raises RequestError where it is no integer from 0 to `last`."""
    try:
        index = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        index = None
    if index is None or not 0 <= index <= last:
        todo = f"Use an integer from 0 to {last}"
        raise RequestError(f"{name} = {shown(value)}", where="request", todo=todo)
    return index
