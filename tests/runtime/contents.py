"""A plain model of what the KV cache holds: names of content, and blocks of them to be copied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np


class Contents:
    """Names what a token leaves in the cache, which depends on the salt and on all tokens up to it: equal
    histories have one name, others never."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int | bytes], int] = {}

    def start(self, salt: bytes) -> int:
        """The name of no tokens."""
        return self._name(0, salt)

    def of(self, salt: bytes, tokens: Iterable[int]) -> np.ndarray:
        """A name for each token: i64 [n], all above 0."""
        at = self.start(salt)
        names = []
        for token in tokens:
            at = self._name(at, token)
            names.append(at)
        return np.array(names, np.int64)

    def _name(self, parent: int, what: int | bytes) -> int:
        return self._names.setdefault((parent, what), len(self._names) + 1)


class Memory:
    """Blocks of every group, and places for them on the host: [n, block + 1] names, 0 at first, of a block's
    tokens and last, where the group keeps it, of what was before the first."""

    def __init__(self, num_blocks: Sequence[int], places: int, block: int) -> None:
        self.blocks = [np.zeros((count, block + 1), np.int64) for count in num_blocks]
        self.places = [np.zeros((places, block + 1), np.int64) for _ in num_blocks]

    def copy_blocks(self, group: int, pairs: np.ndarray) -> None:
        for source, target in pairs.tolist():
            self.blocks[group][target] = self.blocks[group][source]

    def swap_out(self, group: int, pairs: np.ndarray) -> None:
        for block, place in pairs.tolist():
            self.places[group][place] = self.blocks[group][block]

    def swap_in(self, group: int, pairs: np.ndarray) -> None:
        for place, block in pairs.tolist():
            self.blocks[group][block] = self.places[group][place]
