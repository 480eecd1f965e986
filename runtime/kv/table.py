"""The blocks of one sequence in one KV group, by block index."""

from __future__ import annotations

import numpy as np

NONE = -1  # in place of a block's id: there is no block, because nobody will read it


class Table:
    """ids: i32, as the executor reads them; blocks before `first` are given back (a window's), and entries
    outside [first, length) mean nothing but are valid ids. Within, an entry of a state may be NONE while a
    step computes its tokens, which then leave nothing there. version: moves on when an entry that is read
    changes.
    """

    def __init__(self) -> None:
        self.ids = np.zeros(8, np.int32)
        self.first = self.length = self.version = 0

    def append(self, block: int) -> None:
        if self.length == len(self.ids):
            self.ids = np.concatenate([self.ids, np.zeros_like(self.ids)])
        self.ids[self.length] = block
        self.length += 1
        self.version += 1

    def pop(self) -> int:
        """Take the last block off."""
        assert self.length > self.first and self.ids[self.length - 1] != NONE
        self.length -= 1
        return self.ids.item(self.length)

    def replace(self, index: int, block: int) -> None:
        """Read another block from now on, a copy of the one there."""
        assert self.first <= index < self.length
        self.ids[index] = block
        self.version += 1

    def skip_to(self, first: int) -> None:
        """Start an empty table at block index `first`."""
        assert self.length == 0
        while self.length < first:
            self.append(0)
        self.first = first

    def live(self) -> list[int]:
        ids = self.ids[self.first : self.length]
        return ids[ids != NONE].tolist()
