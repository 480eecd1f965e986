"""Tokens of the IR's text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PATTERN = re.compile(
    r"""(?P<space>[ \t\r]+)
      | (?P<newline>\n)
      | (?P<loc>//\ [^\n]*$)
      | (?P<float>-?(?:\d+\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|inf\b)|nan\b)
      | (?P<int>\d+)
      | (?P<value>%[A-Za-z0-9_][A-Za-z0-9_.]*)
      | (?P<weight>@(?:[A-Za-z0-9_][A-Za-z0-9_.]*|"(?:[^"\\\n]|\\.)*"))
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>\.\.|//|<=|>=|==|!=|[-+*<>=&|~(){}\[\],:;])
    """,
    re.VERBOSE | re.MULTILINE,
)


class ParseError(ValueError):
    """The text is not a graph. The message names line and column."""


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int
    column: int

    def fail(self, message: str) -> ParseError:
        return ParseError(f"line {self.line}, column {self.column}: {message}")


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a text, then one of kind "end". Raises ParseError at a character that starts none."""
    position, line, line_start = 0, 1, 0
    while position < len(text):
        match = _PATTERN.match(text, position)
        if match is None:
            raise Token("", "", line, position - line_start + 1).fail(
                f"unexpected character {text[position]!r}"
            )
        kind = str(match.lastgroup)
        if kind != "space" and kind != "newline":
            yield Token(kind, match.group(), line, position - line_start + 1)
        position = match.end()
        if kind == "newline":
            line, line_start = line + 1, position
    yield Token("end", "end of text", line, position - line_start + 1)
