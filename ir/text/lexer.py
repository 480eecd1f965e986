"""Tokens of the IR's text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_PATTERN = re.compile(
    r"""(?P<space>[ \t\r]+)
      | (?P<newline>\n)
      | (?P<float>-?(?:\d+\.\d+(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|inf\b)|nan\b)
      | (?P<int>\d+)
      | (?P<value>%(?:[A-Za-z0-9_][A-Za-z0-9_.]*|"(?:[^"\\\n]|\\.)*"))
      | (?P<weight>@(?:[A-Za-z0-9_][A-Za-z0-9_.]*|"(?:[^"\\\n]|\\.)*"))
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>\.\.|//|<=|>=|==|!=|[-+*<>=&|~(){}\[\],:;])
    """,
    re.VERBOSE | re.ASCII,
)
MAX_MESSAGE = 300
_LOC = re.compile(r"// ([^\n]*)")


class ParseError(ValueError):
    """The text is not a graph. line, column: where, from 1."""

    def __init__(self, reason: str, line: int, column: int) -> None:
        self.reason, self.line, self.column = reason, line, column
        super().__init__(f"line {line}, column {column}: {reason}")


@dataclass(frozen=True)
class Token:
    kind: str
    text: str
    line: int
    column: int

    def fail(self, message: str) -> ParseError:
        short = message if len(message) <= MAX_MESSAGE else f"{message[: MAX_MESSAGE - 3]}..."
        return ParseError(short, self.line, self.column)


def tokens(text: str) -> Iterator[Token]:
    """The tokens of a text, then one of kind "end". Raises ParseError at a character that starts none.

    `// ` starts a loc after an op, which is inside one bracket, the graph's; deeper it is a division.
    """
    position, line, line_start, depth = 0, 1, 0, 0
    while position < len(text):
        at_op = depth == 1 and text.startswith("// ", position)  # inside brackets // divides
        match = (_LOC if at_op else _PATTERN).match(text, position)
        if match is None:
            raise Token("", "", line, position - line_start + 1).fail(
                f"unexpected character {text[position]!r}"
            )
        kind = "loc" if at_op else str(match.lastgroup)
        depth += match.group() in ("(", "[", "{")
        depth -= match.group() in (")", "]", "}")
        if kind != "space" and kind != "newline":
            yield Token(kind, match.group(), line, position - line_start + 1)
        position = match.end()
        if kind == "newline":
            line, line_start = line + 1, position
    yield Token("end", "end of text", line, position - line_start + 1)
