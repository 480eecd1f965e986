"""Drafters for tests, that are right, wrong, too eager or broken, as a generator of random numbers says."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from typing import Any

import numpy as np

from runtime.scheduler import Chunk
from runtime.sequence import Sequence

Tokens = Callable[[Sequence], Seq[int]]  # all that a sequence will give, from its first output token on


class OracleDrafter:
    """Knows what comes, and says it, or a part of it, or something else, or more than it was asked for.

    fails: one call in so many raises, or claims more drafts than were wanted; 0: none. scribble: writes
    garbage where a model that drafts on the target's blocks would write keys and values.
    """

    name = "oracle"
    setup_s = 0.0

    def __init__(
        self,
        tokens: Tokens,
        vocab_size: int,
        rng: np.random.Generator,
        *,
        fails: int = 0,
        scribble: Callable[[Sequence, range], None] | None = None,
    ) -> None:
        self._tokens, self._vocab_size, self._rng = tokens, vocab_size, rng
        self._fails, self._scribble = fails, scribble
        self.known: set[Sequence] = set()  # that it was asked for and not told to forget
        self.closed = 0

    def draft(self, chunks: Seq[Chunk], wanted: Seq[int]) -> list[int]:
        counts = [self._draft(chunk, most) for chunk, most in zip(chunks, wanted, strict=True)]
        if self._fails and not self._rng.integers(self._fails):
            if self._rng.integers(2):
                raise RuntimeError("a drafter broke down")
            return [most + 1 for most in wanted]
        return counts

    def _draft(self, chunk: Chunk, most: int) -> int:
        seq = chunk.seq
        assert most == chunk.drafts >= 1 and chunk.count == most + 1
        assert seq.computed == seq.num_tokens - 1 and seq.num_tokens + most < seq.max_tokens
        self.known.add(seq)
        if self._scribble is not None:
            self._scribble(seq, range(seq.computed, seq.num_tokens + most))
        room = len(seq.ids) - seq.num_tokens
        found = self._proposal(seq, most)
        seq.ids[seq.num_tokens :][: len(found)] = found[:room]
        return min(most, len(found))

    def _proposal(self, seq: Sequence, most: int) -> list[int]:
        """What to write: of a length of its own choice, that may be more than was wanted."""
        rng, after = self._rng, seq.num_tokens - seq.prompt_tokens
        right = list(self._tokens(seq)[after : after + most])
        kind = rng.integers(6)
        if kind == 0:
            return rng.integers(0, self._vocab_size, rng.integers(0, most + 1)).tolist()
        if kind == 1 and right:
            right[rng.integers(len(right))] = int(rng.integers(0, self._vocab_size))
        if kind == 2:
            right = right[: rng.integers(0, len(right) + 1)]
        if kind == 3:
            right[rng.integers(len(right) + 1) :] = [int(rng.choice([-1, self._vocab_size, 2**31 - 1]))]
        if kind == 4:
            right += [0] * int(rng.integers(0, 5))
        return right

    def settle(self, seq: Sequence) -> None:
        assert seq in self.known
        assert seq.computed < seq.num_tokens + 64

    def forget(self, seq: Sequence) -> None:
        self.known.discard(seq)

    def close(self) -> None:
        self.closed += 1


class RandomPace:
    """Any lengths at any time, as those of a pace that goes by the clock may be."""

    speedup: float | None = None

    def __init__(self, rng: np.random.Generator, most: int) -> None:
        self._rng, self._most = rng, most
        self.keys: set[Hashable] = set()

    def lengths(self, keys: Seq[Hashable], most: Seq[int], samples: int, tokens: int) -> list[int]:
        assert all(fit >= 1 for fit in most) and len(keys) <= samples <= tokens
        self.keys.update(keys)
        return [int(self._rng.integers(0, min(fit, self._most) + 1)) for fit in most]

    def learn(
        self,
        samples: int,
        tokens: int,
        seconds: float,
        draft_s: float = 0.0,
        verified: Any = (),
        setup_s: float = 0.0,
    ) -> None:
        assert seconds >= 0 <= draft_s and tokens >= samples
        for found in verified:
            assert found.key in self.keys or found.drafted
            assert 0 <= found.accepted <= found.drafted >= 1

    def least_chance(self, samples: int, requests: int) -> float:
        assert samples >= requests >= 1
        return float(self._rng.choice([0.0, 0.3]))

    def plain_s(self, samples: int) -> float | None:
        return 1.0 if samples else None

    def forget(self, key: Hashable) -> None:
        self.keys.discard(key)
