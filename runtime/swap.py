"""Blocks of preempted sequences on the host, from where they go on without being computed again.

The places there are a pool beside each group's; copies are noted as they are planned, and done in that order
before the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.blocks import Table
from runtime.cache import Cache
from runtime.sequence import Sequence


class Mover(Protocol):
    """An executor that copies blocks to places on the host and back."""

    def swap_out(self, group: int, pairs: np.ndarray) -> None:
        """pairs: i32 [n, 2], a block and a place. What a later step writes is not copied."""
        ...

    def swap_in(self, group: int, pairs: np.ndarray) -> None:
        """pairs: i32 [n, 2], a place and a block. A later step reads them."""
        ...


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence on the host. tables: per group the index of its first block, and the blocks' places."""

    computed: int
    tables: list[tuple[int, list[int]]]


class Swap:
    """num_places: for blocks of each group; none without a mover."""

    def __init__(self, cache: Cache, mover: Mover | None = None, num_places: int = 0) -> None:
        self._cache, self._mover = cache, mover
        self.num_places = num_places if mover is not None else 0
        self.swapped_blocks = 0
        self._free = [list(range(self.num_places)) for _ in cache.groups]
        self._held: dict[Sequence, Held] = {}
        self._moves: list[tuple[bool, int, list[tuple[int, int]]]] = []  # (whether out, group, pairs)

    def holds(self, seq: Sequence) -> bool:
        return seq in self._held

    def hold(self, seq: Sequence) -> bool:
        """Give its blocks back and keep what they hold; False, and nothing is done, where room lacks."""
        full = -(-seq.computed // self._cache.block)
        blocks = [table.ids[table.first : full].tolist() for table in seq.tables]
        if not any(blocks) or any(len(b) > len(f) for b, f in zip(blocks, self._free, strict=True)):
            return False
        tables: list[tuple[int, list[int]]] = []
        for group, (table, ids, free) in enumerate(zip(seq.tables, blocks, self._free, strict=True)):
            places = [free.pop() for _ in ids]
            tables.append((table.first, places))
            self._moves.append((True, group, list(zip(ids, places, strict=True))))
            self.swapped_blocks += len(ids)
        self._held[seq] = Held(seq.computed, tables)
        self._cache.free(seq)
        return True

    def restore(self, seq: Sequence, step_tokens: int, spare: int) -> bool:
        """Go on with what is held, if its known tokens fit with `spare` blocks to go (as Cache.admit)."""
        cache, held = self._cache, self._held[seq]
        for group, pool in zip(cache.groups, cache.pools, strict=True):
            if group.most_blocks(seq.num_tokens, step_tokens, cache.block) + spare > pool.num_free:
                return False
        for group, (pool, (first, places)) in enumerate(zip(cache.pools, held.tables, strict=True)):
            table = Table()
            table.skip_to(first)
            for _ in places:
                table.append(pool.allocate())
            self._moves.append((False, group, list(zip(places, table.live(), strict=True))))
            seq.tables.append(table)
        seq.computed = held.computed
        self.drop(seq)
        return True

    def drop(self, seq: Sequence) -> None:
        """Forget what is held of a sequence, if anything is."""
        held = self._held.pop(seq, None)
        if held is not None:
            for free, (_, places) in zip(self._free, held.tables, strict=True):
                free += places

    def move(self) -> None:
        """Start the copies that were planned. Raises EngineError."""
        moves, self._moves = self._moves, []
        for out, group, pairs in moves:
            if pairs:
                assert self._mover is not None
                copy = self._mover.swap_out if out else self._mover.swap_in
                copy(group, np.array(pairs, np.int32))

    def check(self) -> None:
        """Assert that every place is free or held once, and by a sequence that waits."""
        assert all(not seq.tables and not seq.finished for seq in self._held)
        for group, free in enumerate(self._free):
            held = [place for each in self._held.values() for place in each.tables[group][1]]
            assert sorted([*free, *held]) == list(range(self.num_places)), "a place is lost or held twice"
