"""A conversation's tokens, with those of its answers as they were sampled.

Text has many spellings in tokens, and a sampled one is often not the tokenizer's own: encoding all messages
anew would change the tokens of earlier answers, and what the engine holds of them would not be found again.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]  # without special tokens


class Spellings:
    """decode: ids to text, of special tokens none."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._known: list[list[int]] = []  # prompt and answer of each turn, each longer than the one before
        self._special: dict[int, bool] = {}

    def add(self, ids: list[int]) -> None:
        """What the engine has computed of a turn: its prompt and the answer, without an end token."""
        self._known.append(ids)

    def respelt(self, ids: list[int]) -> list[int]:
        """The same text and special tokens, spelt as the longest known beginning. ids: as the tokenizer has
        it. What is no beginning of it is forgotten: the turn was taken back."""
        while self._known:
            known = self._known[-1]
            end = self._end(known, ids)
            if end is not None:
                return known + ids[end:]
            self._known.pop()
        return ids

    def _end(self, known: list[int], ids: list[int]) -> int | None:
        """How many of the ids are the same text and special tokens as all that is known."""
        text = self._decode(known)
        end = bisect.bisect_left(range(len(ids)), len(text), key=lambda n: len(self._decode(ids[:n])))
        while end < len(ids) and not self._is_whole(ids[:end], text):
            end += 1
        parts = self._parts(known)
        while end < len(ids) and len(self._parts(ids[:end])) < len(parts):  # special tokens have no text
            end += 1
        return end if self._parts(ids[:end]) == parts else None

    def _parts(self, ids: list[int]) -> list[str | int]:
        """Texts, and the special tokens between them."""
        parts: list[str | int] = []
        start = 0
        for at, token in enumerate(ids):
            if self._is_special(token):
                parts += [self._decode(ids[start:at]), token]
                start = at + 1
        return [*parts, self._decode(ids[start:])]

    def _is_whole(self, ids: list[int], text: str) -> bool:
        """Whether they are the text, or can be it no more. (Half a character is as long as a whole one.)"""
        found = self._decode(ids)
        return found == text or len(found) > len(text)

    def _is_special(self, token: int) -> bool:
        found = self._special.get(token)
        if found is None:
            found = self._special[token] = self._decode([token]) == ""
        return found
