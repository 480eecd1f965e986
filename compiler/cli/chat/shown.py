"""What is seen of a chat: answers on standard output, and all else on standard error; or JSON alone."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any, TextIO

from compiler.cli.chat import figures
from compiler.cli.chat.commands import Reply
from compiler.cli.chat.session import Session, Turn
from compiler.cli.streams import for_terminal
from runtime.errors import OctavoError, printable


class Text:
    """As people read it. notes: whether somebody looks on, who wants to know how fast it was."""

    def __init__(self, notes: bool) -> None:
        self._notes = notes
        self._dim = _has_styles(sys.stderr)
        self._waits = False  # a line says so

    def waiting(self, text: str) -> None:
        """Until something else is shown."""
        if self._notes and self._dim:
            self._waits = True
            print(f"\033[2m{text}\033[0m", end="", file=sys.stderr, flush=True)

    def piece(self, text: str) -> None:
        """Of an answer, as it comes."""
        if text:
            self.arrived()
            sys.stdout.write(for_terminal(text))
            sys.stdout.flush()

    def turn(self, line: str, turn: Turn, session: Session) -> None:
        """The end of an answer."""
        self.piece("\n")
        ending = figures.ending(turn, session.settings.max_new_tokens, session.settings.timeout)
        self.note(figures.line(turn) + (f"; {ending}" if ending else ""))
        self.note("")

    def reply(self, line: str, reply: Reply) -> None:
        if reply.text:
            print(printable(reply.text), file=sys.stderr, flush=True)

    def error(self, line: str, error: Exception) -> None:
        self.arrived()
        print(printable(f"octavo: {_parts(error)}"), file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        """A line for who looks on, dim."""
        self.arrived()
        if self._notes:
            print(f"\033[2m{text}\033[0m" if self._dim and text else text, file=sys.stderr, flush=True)

    def arrived(self) -> None:
        """Nothing is waited for any more."""
        if self._waits:
            self._waits = False
            print("\r\033[K", end="", file=sys.stderr, flush=True)


class Json:
    """One object for each line that was read, in its order."""

    def waiting(self, text: str) -> None:
        """Nobody reads it."""

    def arrived(self) -> None:
        """As little."""

    def piece(self, text: str) -> None:
        """Comes with the turn."""

    def turn(self, line: str, turn: Turn, session: Session) -> None:
        _print({"line": line, "answer": turn.completion.text, **figures.of_turn(turn)})

    def reply(self, line: str, reply: Reply) -> None:
        found: Any = reply.found
        found = dataclasses.asdict(found) if dataclasses.is_dataclass(found) else found  # type: ignore[arg-type]
        _print({"line": line, "text": reply.text, "found": found})

    def error(self, line: str, error: Exception) -> None:
        said = _parts(error)
        fields = {"what": said.what, "where": said.where, "todo": said.todo}
        _print({"line": line, "error": {"kind": type(error).__name__, **fields}})

    def note(self, text: str) -> None:
        """Nobody reads it."""


def _print(fields: dict[str, Any]) -> None:
    print(json.dumps(fields), flush=True)


def _parts(error: Exception) -> OctavoError:
    """Of a file, as of all else. (Names are those of /set, and not of the command's options.)"""
    if isinstance(error, OctavoError):
        return error
    assert isinstance(error, OSError)
    todo = "Check the path and its permissions"
    return OctavoError(error.strerror or type(error).__name__, where=str(error.filename), todo=todo)


def _has_styles(stream: TextIO) -> bool:
    return stream.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
