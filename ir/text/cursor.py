"""A place in a text's tokens: taking them one by one, lists of things, strings."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

from ir.text.lexer import Token, tokens

T = TypeVar("T")

MAX_DEPTH = 48
MAX_INT = 2**63

_KINDS = {
    "value": "a %value", "weight": "a @name", "name": "a name", "int": "an integer", "end": "the text's end",
}  # fmt: skip


class Cursor:
    """The tokens and the index of the next one. Each method raises ParseError where the text does not fit."""

    def __init__(self, text: str) -> None:
        self._tokens = list(tokens(text))
        self._index = 0
        self._depth = 0

    @property
    def next(self) -> Token:
        return self._tokens[self._index]

    def take(self, kind: str | None = None) -> Token:
        token = self.next
        if kind is not None and token.kind != kind:
            raise token.fail(f"expected {_KINDS[kind]}, found {token.text!r}")
        self._index += 1
        return token

    def at(self, *signs: str) -> bool:
        """Whether one of these signs or names is next."""
        return self.next.text in signs and self.next.kind in ("sign", "name")

    def accept(self, text: str) -> bool:
        if self.at(text):
            self._index += 1
            return True
        return False

    def expect(self, text: str) -> None:
        if not self.accept(text):
            raise self.next.fail(f"expected {text!r}, found {self.next.text!r}")

    def several(self, item: Callable[[], T], end: str) -> tuple[T, ...]:
        """Items separated by commas up to `end`, which is taken."""
        items: list[T] = []
        while not self.accept(end):
            if items:
                self.expect(",")
            items.append(item())
        return tuple(items)

    def named(self, item: Callable[[], tuple[str, T]], end: str) -> dict[str, T]:
        """Like several, of named items whose names differ."""
        items: dict[str, T] = {}
        while not self.accept(end):
            if items:
                self.expect(",")
            token = self.next
            name, value = item()
            if name in items:
                raise token.fail(f"{name} is given twice")
            items[name] = value
        return items

    def integer(self) -> int:
        token = self.take("int")
        if len(token.text) > 19 or int(token.text) > MAX_INT:
            raise token.fail("the integer is larger than 64 bits hold")
        return int(token.text)

    @contextmanager
    def deeper(self) -> Generator[None]:
        """Guards a recursion."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self.next.fail(f"nested deeper than {MAX_DEPTH}")
        yield
        self._depth -= 1


def unquote(token: Token, text: str) -> str:
    """The string that a quoted text stands for, JSON's rules."""
    try:
        return str(json.loads(text))
    except json.JSONDecodeError as e:
        raise token.fail(f"malformed string: {e.msg}") from None
