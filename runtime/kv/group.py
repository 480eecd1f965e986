"""What the cache knows of one KV group: its number of blocks, and what of a request it keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """num_blocks blocks; a query at position q reads keys above q - window (None: all)."""

    num_blocks: int
    window: int | None = None

    def first_live(self, computed: int, block: int) -> int:
        """Index of the first block that a token at position `computed` or later can read."""
        return 0 if self.window is None else max(0, (computed - self.window + 1) // block)

    def most_blocks(self, tokens: int, step_tokens: int, block: int) -> int:
        """The most blocks that a request of `tokens` holds at once, in steps of at most `step_tokens`."""
        need = -(-tokens // block)
        if self.window is None:
            return need
        return min(need, (self.window + step_tokens + block - 2) // block + 1)
