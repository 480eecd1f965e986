"""What the cache knows of one KV group: its number of blocks, and what of a request it keeps."""

from __future__ import annotations

from dataclasses import dataclass

STATE_BLOCKS = 2  # of a state, that a request needs at once


@dataclass(frozen=True)
class Group:
    """num_blocks blocks; a query at position q reads keys above q - window (None: all).

    tail: it reads those of its own block alone, which another group quantises when it is full. state: of a
    recurrence, it goes on from the block of the token before it, which holds the state at its start.
    """

    num_blocks: int
    window: int | None = None
    tail: bool = False
    state: bool = False

    @property
    def is_full(self) -> bool:
        """Whether it keeps every token."""
        return self.window is None and not self.is_single

    @property
    def is_single(self) -> bool:
        """Whether it keeps one block of a request, between steps, however many tokens that has."""
        return self.tail or self.state

    def first_live(self, computed: int, block: int) -> int:
        """Index of the first block that a token at position `computed` or later can read."""
        if self.tail:
            return computed // block
        if self.state:
            return max(0, computed - 1) // block
        return 0 if self.window is None else max(0, (computed - self.window + 1) // block)

    def most_blocks(self, tokens: int, step_tokens: int, block: int) -> int:
        """The blocks that a request of `tokens` needs at once, in steps of at most `step_tokens`.

        Of a tail one is enough: a chunk takes more where there are some (Cache.chunk_limit). Of a state two
        are: the one that it goes on from, and the one in which a step ends; none of those between is read.
        """
        if self.tail:
            return 1
        need = -(-tokens // block)
        if self.state:
            return min(need, STATE_BLOCKS)
        if self.window is None:
            return need
        return min(need, (self.window + step_tokens + block - 2) // block + 1)
