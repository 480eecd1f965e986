"""The KV cache: one block pool per KV group, and what sequences do to all of them at once.

A prefix hit is the longest run of full blocks that every group can serve: a full group needs all of them, a
window group those that the next token can still see. The hit leaves at least the last token to compute.
A fork shares all blocks, the last, partial one too; whoever writes to a shared block first copies it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from runtime.kv.blocks import BlockPool, Sealed, chain_hash, chain_root
from runtime.kv.group import Group
from runtime.kv.moves import Moves
from runtime.kv.pins import Pins
from runtime.kv.table import Table
from runtime.log import Log
from runtime.sequence import Sequence


class Cache:
    """All groups. Block ids are per group; the block size is one for all."""

    def __init__(
        self,
        groups: Seq[Group],
        *,
        block: int = 16,
        prefix_cache: bool = True,
        salt: bytes = b"",
        log: Log | None = None,
    ) -> None:
        self.groups, self.block = tuple(groups), block
        self.pools = [BlockPool(group.num_blocks) for group in self.groups]
        self.prefix_cache, self._salt = prefix_cache, salt or b"octavo"
        self.pins = Pins(self.groups, block)
        self.moves, self.log = Moves(), log or Log()
        self._coming: Counter[bytes] = Counter()  # hashes of full blocks that admitted sequences will compute

    def fits(self, tokens: int, step_tokens: int, shared: int = 0) -> bool:
        """Whether a request of `tokens` tokens can run when it is alone with the pinned prefixes, of which it
        shares so many blocks in full groups."""
        needs = [g.most_blocks(tokens, step_tokens, self.block) for g in self.groups]
        return all(
            need - (shared if group.window is None else 0) + self.pins.blocks(group) <= group.num_blocks
            for need, group in zip(needs, self.groups, strict=True)
        )

    def admit(self, seq: Sequence, step_tokens: int, others: Seq[Sequence] = ()) -> bool:
        """Start a request from its longest prefix hit, if its known tokens fit beside the running others.

        Not yet, if what comes after the hit is being computed for another: it is a hit soon.
        """
        hit, chain = self._hit(seq)
        if hit < len(chain) and self._coming[chain[hit].hash]:
            return False
        seq.tables = [
            self._open(group, pool, chain[:hit]) for group, pool in zip(self.groups, self.pools, strict=True)
        ]
        seq.computed = hit * self.block
        if not self.has_room(seq, step_tokens, others):
            self.free(seq)
            return False
        self._announce(seq, hit, len(chain))
        if hit:
            self.log.add("prefix_hit", seq.owner, seq.computed)
        return True

    def has_room(self, seq: Sequence, step_tokens: int, others: Seq[Sequence]) -> bool:
        """Whether a sequence should start to run: its known tokens fit, and a part of what all may yet need.

        A quarter, in full groups, and at least one block for each of the others: most end before their limit,
        and being preempted now and then costs less than places that stay empty.
        """
        spare = [
            len(others),
            _growth(seq, self.block) + sum([max(1, _growth(s, self.block)) for s in others]),
        ]
        held = [table.length - table.first for table in seq.tables] or [0] * len(self.groups)
        return all(
            group.most_blocks(seq.num_tokens, step_tokens, self.block) - own + spare[group.window is None]
            <= pool.num_free
            for group, pool, own in zip(self.groups, self.pools, held, strict=True)
        )

    def extend(self, seq: Sequence, tokens: int) -> bool:
        """Hold blocks for the first `tokens` tokens, and alone those that will be written.

        In every group or, where one lacks blocks, in none.
        """
        need, at = -(-tokens // self.block), seq.computed // self.block
        lacking = [max(0, need - table.length) for table in seq.tables]
        if seq.alone_in == at and not any(lacking):
            return True  # as in most steps
        shared = [
            at < table.length and pool.is_shared(table.ids.item(at))
            for table, pool in zip(seq.tables, self.pools, strict=True)
        ]
        wanted = [lack + copy for lack, copy in zip(lacking, shared, strict=True)]
        if any(want > pool.num_free for want, pool in zip(wanted, self.pools, strict=True)):
            return False
        for group, (table, copy) in enumerate(zip(seq.tables, shared, strict=True)):
            if copy:
                self._copy_on_write(seq, group, at)
            while table.length < need:
                table.append(self.allocate(seq, group))
        seq.alone_in = at
        return True

    def advance(self, seq: Sequence, computed: int) -> None:
        """Record that tokens up to `computed` are in the cache.

        Blocks that filled are sealed; those that a window has left behind are given back.
        """
        full_before, full_now = seq.computed // self.block, computed // self.block
        seq.computed = computed
        if self.prefix_cache and full_now > full_before:
            chain = self._chain(seq, full_now)
            for table, pool in zip(seq.tables, self.pools, strict=True):
                for i in range(max(full_before, table.first), full_now):
                    self._seal(pool, table, i, chain[i])
            self._arrived(seq, full_now)
        for group, table, pool in zip(self.groups, seq.tables, self.pools, strict=True):
            if group.window is None:
                continue
            first = group.first_live(computed, self.block)
            while table.first < min(first, table.length):
                pool.release(int(table.ids[table.first]))
                table.ids[table.first] = 0
                table.first += 1

    def fork(self, parent: Sequence, child: Sequence, computed: int) -> bool:
        """Start the child, whose first `computed` tokens are the parent's, from the parent's blocks.

        False, and nothing is done, where the parent has given back what the child reads, or a block lacks to
        write into.
        """
        assert computed <= min(parent.computed, child.num_tokens)
        firsts = [group.first_live(computed, self.block) for group in self.groups]
        if not computed or any(t.first > first for t, first in zip(parent.tables, firsts, strict=True)):
            return False
        if any(pool.num_free < 1 for pool in self.pools):
            return False
        for first, pool, source in zip(firsts, self.pools, parent.tables, strict=True):
            table = Table()
            table.skip_to(first)
            for block in source.ids[first : -(-computed // self.block)].tolist():
                pool.retain(block)
                table.append(block)
            child.tables.append(table)
        parent.alone_in = None
        child.computed, child.chain = computed, parent.chain[: computed // self.block]
        self.log.add("fork", child.owner, computed, f"request {parent.owner[0]}, sample {parent.owner[1]}")
        return True

    def free(self, seq: Sequence) -> None:
        """Give everything back, the tail first: it is evicted before the head, which more requests share."""
        self._arrived(seq, seq.coming.stop)
        for table, pool in zip(seq.tables, self.pools, strict=True):
            for block in reversed(table.live()):
                pool.release(block)
        seq.tables, seq.computed, seq.alone_in = [], 0, None

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert the invariants of all pools, given every sequence that holds blocks."""
        holders = [seq for seq in holders if seq.tables]
        for index, pool in enumerate(self.pools):
            pool.check(seq.tables[index] for seq in holders)
        coming = Counter(seq.chain[i].hash for seq in holders for i in seq.coming)
        assert coming == self._coming, "what is expected differs from what is being computed"

    def allocate(self, seq: Sequence, group: int) -> int:
        """A free block, for the sequence. Look at the pool's num_free first."""
        pool = self.pools[group]
        evictions = pool.evictions
        block = pool.allocate()
        if pool.evictions > evictions:
            self.log.add("evict", seq.owner, 1, f"group {group} has no other free block")
        return block

    def _seal(self, pool: BlockPool, table: Table, index: int, content: Sealed) -> None:
        """Seal a block that filled; where there is one with this content, share it instead."""
        block = table.ids.item(index)
        found = pool.seal(block, content)
        if found != block:
            pool.retain(found)
            table.replace(index, found)
            pool.release(block)

    def _copy_on_write(self, seq: Sequence, group: int, index: int) -> None:
        table, pool = seq.tables[group], self.pools[group]
        source, target = table.ids.item(index), self.allocate(seq, group)
        self.moves.copy(group, source, target)
        table.replace(index, target)
        pool.release(source)
        self.log.add("copy_on_write", seq.owner, 1, f"group {group}, block {index} of the sequence is shared")

    def _chain(self, seq: Sequence, length: int) -> list[Sealed]:
        """Contents of the first `length` full blocks; kept, because known tokens never change."""
        chain = seq.chain
        while len(chain) < length:
            at = len(chain) * self.block
            parent = chain[-1].hash if chain else chain_root(self._salt, seq.salt)
            tokens = seq.ids[at : at + self.block].tobytes()
            chain.append(Sealed(chain_hash(parent, tokens), parent, tokens))
        return chain

    def _announce(self, seq: Sequence, start: int, stop: int) -> None:
        """The sequence will compute its full blocks [start, stop)."""
        seq.coming = range(start, max(start, stop))
        for i in seq.coming:
            self._coming[seq.chain[i].hash] += 1

    def _arrived(self, seq: Sequence, stop: int) -> None:
        """It has computed those before `stop`, or never will."""
        for i in range(seq.coming.start, min(stop, seq.coming.stop)):
            self._coming[seq.chain[i].hash] -= 1
            if not self._coming[seq.chain[i].hash]:
                del self._coming[seq.chain[i].hash]
        seq.coming = range(max(stop, seq.coming.start), max(stop, seq.coming.stop))

    def _hit(self, seq: Sequence) -> tuple[int, list[Sealed]]:
        """How many blocks the longest prefix has that every group can serve, and the contents of all that
        could be served."""
        if not self.prefix_cache or not self.groups:
            return 0, []
        best = min(seq.num_tokens - 1, seq.hit_limit) // self.block
        chain = self._chain(seq, best)[:best]
        while best > 0:  # every group shortens it until all agree
            served = min(
                self._served(g, p, chain, best) for g, p in zip(self.groups, self.pools, strict=True)
            )
            if served == best:
                break
            best = served
        return best, chain

    def _served(self, group: Group, pool: BlockPool, chain: list[Sealed], most: int) -> int:
        """The longest prefix of at most `most` blocks that this group can serve."""
        if group.window is None:
            return next((i for i in range(most) if pool.find(chain[i]) is None), most)
        run = [0]  # run[i]: how many blocks before index i are found without a gap
        for content in chain[:most]:
            run.append(run[-1] + 1 if pool.find(content) is not None else 0)
        fits = (n for n in range(most, 0, -1) if run[n] >= n - group.first_live(n * self.block, self.block))
        return next(fits, 0)

    def _open(self, group: Group, pool: BlockPool, chain: list[Sealed]) -> Table:
        table = Table()
        if chain:
            table.skip_to(min(len(chain), group.first_live(len(chain) * self.block, self.block)))
        for content in chain[table.first :]:
            block = pool.find(content)
            assert block is not None
            pool.retain(block)
            table.append(block)
        return table


def _growth(seq: Sequence, block: int) -> int:
    """A quarter of the blocks that it may come to need beyond its known tokens."""
    return (seq.max_tokens - seq.num_tokens) // (4 * block)
