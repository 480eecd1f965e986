"""Text from a stream of tokens: never half a character, and in all what decoding them at once gives."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

BROKEN = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """decode: ids to text. byte_tokens: tokens that stand for one byte; a run of them is decoded as a whole,
    so its text is certain only once it ends. skipped: special tokens, which have no text.

    Only a window of the last tokens is decoded: from a token whose text was certain, so that what a decoder
    does at the start of a text (dropping a space) is done outside of what is new. alone: texts of single
    tokens, which most windows begin with; one for all detokenizers of a decoder.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        byte_tokens: Collection[int] = (),
        skipped: Collection[int] = (),
        alone: dict[int, str] | None = None,
    ) -> None:
        self._decode, self._byte_tokens, self._skipped = decode, byte_tokens, skipped
        self._alone = {} if alone is None else alone
        self._ids: list[int] = []  # the window
        self._read = 0  # tokens of the window whose text has been given out
        self._known = ""  # text of those

    def push(self, token_id: int) -> str:
        """The text that has become certain with this token; often one token's, sometimes none."""
        if token_id in self._skipped:
            return ""
        self._ids.append(token_id)
        if token_id in self._byte_tokens:
            return ""
        text = self._decode(self._ids)
        if text.endswith(BROKEN) or len(text) <= len(self._known):
            return ""
        return self._give(text)

    def flush(self) -> str:
        """What was held back, as it decodes at the end."""
        text = self._decode(self._ids)
        return self._give(text) if len(text) > len(self._known) else ""

    def _give(self, text: str) -> str:
        delta = text[len(self._known) :]
        self._ids, self._read = self._ids[self._read :], len(self._ids) - self._read
        self._known = self._decode_alone(self._ids[0]) if len(self._ids) == 1 else self._decode(self._ids)
        return delta

    def _decode_alone(self, token_id: int) -> str:
        text = self._alone.get(token_id)
        if text is None:
            text = self._alone[token_id] = self._decode([token_id])
        return text


class StopMatcher:
    """Finds stop texts in streamed text, across tokens. What might still become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is certain now, and whether a stop text was met.

        The one that is complete first counts (of several, the longest), and the text ends before it.
        """
        if not self._stops:
            return text, False
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        keep = min(found)[1] if found else len(self._held) - self._overlap()
        out, self._held = self._held[:keep], "" if found else self._held[keep:]
        return out, bool(found)

    def flush(self) -> str:
        out, self._held = self._held, ""
        return out

    def _overlap(self) -> int:
        """Length of the longest end of the text that begins a stop text."""
        longest = min(len(self._held), max(len(stop) for stop in self._stops) - 1)
        ends = (n for n in range(longest, 0, -1) if any(s.startswith(self._held[-n:]) for s in self._stops))
        return next(ends, 0)
