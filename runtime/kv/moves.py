"""Copies of blocks, planned while a step is put together and done, in that order, before it runs.

A block that was given back meanwhile may be another's by then: what that one gets is copied later in the same
order, or written by the step itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np


class Mover(Protocol):
    """An executor, as what copies blocks. pairs: i32 [n, 2], from and to; no block is in two of them."""

    def copy_blocks(self, group: int, pairs: np.ndarray) -> None:
        """Within one group."""
        ...

    def swap_out(self, group: int, pairs: np.ndarray) -> None:
        """Blocks to places on the host. What a later step writes is not copied."""
        ...

    def swap_in(self, group: int, pairs: np.ndarray) -> None:
        """Places on the host to blocks. A later step reads them."""
        ...


class Moves:
    """What is planned: runs of pairs of one kind in one group."""

    def __init__(self) -> None:
        self._planned: list[tuple[str, int, list[tuple[int, int]]]] = []

    def copy(self, group: int, source: int, target: int) -> None:
        self._planned.append(("copy", group, [(source, target)]))

    def swap_out(self, group: int, blocks: list[int], places: list[int]) -> None:
        self._planned.append(("out", group, list(zip(blocks, places, strict=True))))

    def swap_in(self, group: int, places: list[int], blocks: list[int]) -> None:
        self._planned.append(("in", group, list(zip(places, blocks, strict=True))))

    def run(self, mover: Mover) -> None:
        """Start the copies. Raises EngineError, and none of them is planned any more."""
        planned, self._planned = self._planned, []
        for kind, group, pairs in planned:
            if pairs:
                _CALLS[kind](mover, group, np.array(pairs, np.int32))


_CALLS: dict[str, Callable[[Mover, int, np.ndarray], None]] = {
    "copy": lambda mover, group, pairs: mover.copy_blocks(group, pairs),
    "out": lambda mover, group, pairs: mover.swap_out(group, pairs),
    "in": lambda mover, group, pairs: mover.swap_in(group, pairs),
}
