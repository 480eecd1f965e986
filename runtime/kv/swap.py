"""Blocks of preempted sequences on the host, from where they go on without being computed again.

The places there are a pool beside each group's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from runtime.kv.cache import Cache
from runtime.kv.table import Table
from runtime.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Held:
    """A sequence on the host. tables: per group the index of its first block, and the blocks' places."""

    computed: int
    tables: list[tuple[int, list[int]]]


class Swap:
    """num_places: for blocks of each group. most_single: of a tail or a state, no more than that."""

    def __init__(self, cache: Cache, num_places: int = 0, most_single: int | None = None) -> None:
        self._cache, self.num_places = cache, num_places
        of_single = num_places if most_single is None else min(num_places, most_single)
        self.places = [of_single if group.is_single else num_places for group in cache.groups]
        self._free = [list(range(count)) for count in self.places]
        self._held: dict[Sequence, Held] = {}

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
            self._cache.moves.swap_out(group, ids, places)
        self._held[seq] = Held(seq.computed, tables)
        self._cache.log.add("swap_out", seq.owner, sum(map(len, blocks)), "it was preempted")
        self._cache.free(seq)
        return True

    def restore(self, seq: Sequence, step_tokens: int, others: Seq[Sequence]) -> bool:
        """Go on with what is held, if its known tokens fit beside the running others (as Cache.admit)."""
        cache, held = self._cache, self._held[seq]
        if not cache.has_room(seq, step_tokens, others):
            return False
        for group, (first, places) in enumerate(held.tables):
            table = Table()
            table.skip_to(first)
            for _ in places:
                table.append(cache.allocate(seq, group))
            cache.moves.swap_in(group, places, table.live())
            seq.tables.append(table)
        seq.computed = held.computed
        num_blocks = sum(len(places) for _, places in held.tables)
        cache.log.add("swap_in", seq.owner, num_blocks, "there is room for it again")
        self.drop(seq)
        return True

    def drop(self, seq: Sequence) -> None:
        """Forget what is held of a sequence, if anything is."""
        held = self._held.pop(seq, None)
        if held is not None:
            for free, (_, places) in zip(self._free, held.tables, strict=True):
                free += places

    def forget(self) -> None:
        """Drop all that is held: a copy failed. What was held is computed again."""
        for seq in list(self._held):
            self.drop(seq)

    def check(self) -> None:
        """Assert that every place is free or held once, and by a sequence that waits."""
        assert all(not seq.tables and not seq.finished for seq in self._held)
        for group, (free, count) in enumerate(zip(self._free, self.places, strict=True)):
            held = [place for each in self._held.values() for place in each.tables[group][1]]
            assert sorted([*free, *held]) == list(range(count)), "a place is lost or held twice"
