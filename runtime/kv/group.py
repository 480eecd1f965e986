"""What the cache knows of one KV group: its number of blocks, and what of a request it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """num_blocks blocks; a query at position q reads keys above q - window (None: all).

    tail: it reads those of its own block alone, which another group quantises when it is full.
    """

    num_blocks: int
    window: int | None = None
    tail: bool = False

    @property
    def is_full(self) -> bool:
        """Whether it keeps every token."""
        return self.window is None and not self.tail

    def first_live(self, computed: int, block: int) -> int:
        """Index of the first block that a token at position `computed` or later can read."""
        if self.tail:
            return computed // block
        return 0 if self.window is None else max(0, (computed - self.window + 1) // block)

    def most_blocks(self, tokens: int, step_tokens: int, block: int) -> int:
        """The blocks that a request of `tokens` needs at once, in steps of at most `step_tokens`.

        Of a tail one is enough: a chunk takes more where there are some (Cache.chunk_limit).
        """
        if self.tail:
            return 1
        need = -(-tokens // block)
        if self.window is None:
            return need
        return min(need, (self.window + step_tokens + block - 2) // block + 1)
