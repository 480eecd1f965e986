"""Prompt lookup: what followed the last tokens when they stood in the prompt or the output before.

It computes nothing: a draft costs the target's row alone. It is right where an answer repeats its question,
as edits, extractions and code do.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from runtime.scheduler import Chunk
from runtime.sequence import Sequence

LONGEST, SHORTEST = 4, 2  # tokens that have to be the same
MOST_TOKENS = 1 << 18  # that indices hold of all sequences, about 500 bytes each


class Index:
    """Where each run of SHORTEST to LONGEST tokens of a sequence stood last: by its tokens, the position
    after it. Each new token is one entry for each length; a run is entered when the token after it is known.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def extend(self, tokens: Seq[int]) -> None:
        known, after = self.tokens, self._after
        for token in tokens:
            at = len(known)
            for length in range(SHORTEST, min(LONGEST, at) + 1):
                after[tuple(known[at - length :])] = at
            known.append(token)

    def find(self, most: int) -> list[int]:
        """Up to `most` tokens that followed the longest run that the sequence ends with, where that stood
        last; none where even the shortest is new."""
        known = self.tokens
        for length in range(min(LONGEST, len(known)), SHORTEST - 1, -1):
            at = self._after.get(tuple(known[-length:]))
            if at is not None:
                return self._following(at, most)
        return []

    def _following(self, at: int, most: int) -> list[int]:
        """Where it reaches the end it goes on with itself, as a text does that repeats."""
        found = self.tokens[at : at + most]
        while len(found) < most:
            found += found[: most - len(found)]
        return found


class LookupDrafter:
    """An index per sequence, made when it is first drafted for. most_tokens: of all; beyond, sequences that
    have no index yet get no drafts."""

    name = "lookup"
    setup_s = 0.0

    def __init__(self, most_tokens: int = MOST_TOKENS) -> None:
        self._indices: dict[Sequence, Index] = {}
        self._most_tokens, self._num_tokens = most_tokens, 0

    def draft(self, chunks: Seq[Chunk], wanted: Seq[int]) -> list[int]:
        return [self._draft(chunk.seq, most) for chunk, most in zip(chunks, wanted, strict=True)]

    def settle(self, seq: Sequence) -> None:
        """Nothing: an index has no drafts in it."""

    def forget(self, seq: Sequence) -> None:
        index = self._indices.pop(seq, None)
        if index is not None:
            self._num_tokens -= len(index.tokens)

    def close(self) -> None:
        self._indices.clear()
        self._num_tokens = 0

    def _draft(self, seq: Sequence, most: int) -> int:
        index = self._index(seq)
        found = [] if index is None else index.find(most)
        seq.ids[seq.num_tokens : seq.num_tokens + len(found)] = found
        return len(found)

    def _index(self, seq: Sequence) -> Index | None:
        index = self._indices.get(seq)
        if index is None:
            if self._num_tokens + seq.num_tokens > self._most_tokens:
                return None
            index = self._indices[seq] = Index()
        new = seq.ids[len(index.tokens) : seq.num_tokens].tolist()
        index.extend(new)
        self._num_tokens += len(new)
        return index
