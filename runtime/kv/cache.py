"""The KV cache: one block pool per KV group, and what sequences do to all of them at once.

A fork shares all blocks, the last, partial one too; whoever writes to a shared block first copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from runtime.kv.blocks import BlockPool, Sealed
from runtime.kv.group import Group
from runtime.kv.moves import Moves
from runtime.kv.pins import Pins
from runtime.kv.prefixes import Prefixes
from runtime.kv.table import NONE, Table
from runtime.log import Log
from runtime.sequence import Sequence


class Cache:
    """All groups. Block ids are per group; the block size is one for all.

    on_free: told of every sequence that is taken off its blocks.
    """

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
        self.prefix_cache = prefix_cache
        self.prefixes = Prefixes(self.groups, self.pools, block, salt or b"octavo")
        self.pins = Pins(self.groups, block)
        self.moves, self.log = Moves(), log or Log()
        self.on_free: Callable[[Sequence], None] | None = None
        self._tails = [index for index, group in enumerate(self.groups) if group.tail]
        self._states = [index for index, group in enumerate(self.groups) if group.state]

    def admit(self, seq: Sequence, step_tokens: int, others: Seq[Sequence] = ()) -> bool:
        """Start a request from its longest prefix hit, if its known tokens fit beside the running others.

        Not yet, if what comes after the hit is being computed for another: it is a hit soon.
        """
        hit, chain = self.prefixes.hit(seq) if self.prefix_cache and self.groups else (0, [])
        if self.prefixes.is_coming(chain, hit):
            return False
        seq.tables = [
            self._open(group, pool, chain[:hit]) for group, pool in zip(self.groups, self.pools, strict=True)
        ]
        seq.computed = hit * self.block
        if not self.has_room(seq, step_tokens, others):
            self.free(seq)
            return False
        self.prefixes.announce(seq, hit, len(chain))
        if hit:
            self.log.add("prefix_hit", seq.owner, seq.computed, f"the first of its {seq.num_tokens}")
        return True

    def has_room(self, seq: Sequence, step_tokens: int, others: Seq[Sequence]) -> bool:
        """Whether a sequence should start to run: its known tokens fit, and a part of what all may yet need.

        A quarter, in full groups, and at least one block for each of the others: most end before their limit,
        and being preempted now and then costs less than places that stay empty. Of tails one for each of the
        others that lacks it.
        """
        growth = _growth(seq, self.block) + sum([max(1, _growth(s, self.block)) for s in others])
        held = [table.length - table.first for table in seq.tables] or [0] * len(self.groups)
        for index, (group, pool, own) in enumerate(zip(self.groups, self.pools, held, strict=True)):
            spare = growth if group.is_full else len(others)
            if group.tail:
                spare = self._lacking(index, others)
            if group.most_blocks(seq.num_tokens, step_tokens, self.block) - own + spare > pool.num_free:
                return False
        return True

    def chunk_limit(self, seq: Sequence, running: Iterable[Sequence]) -> int:
        """The most tokens of its next chunk that tails have blocks for, when each of the others gets one that
        lacks it. At least 1, though there may be no block for it."""
        limit = seq.max_tokens
        others = [s for s in running if s is not seq] if self._tails else []
        for group in self._tails:
            free = self.pools[group].num_free - self._lacking(group, others)
            free -= bool(self._is_shared(group, seq))
            held = seq.tables[group].length * self.block - seq.computed
            limit = min(limit, held + max(0, free) * self.block)
        return max(1, limit)

    def extend(self, seq: Sequence, tokens: int) -> bool:
        """Hold blocks for the first `tokens` tokens, and alone those that will be written.

        In every group or, where one lacks blocks, in none. Of a state's blocks those that nobody reads after
        the step are left out, however many of the tokens beyond num_tokens, drafts, are right.
        """
        need, at = -(-tokens // self.block), seq.computed // self.block
        lacking = [max(0, need - table.length) for table in seq.tables]
        if seq.alone_in == at and not any(lacking):
            return True  # as in most steps
        starts = [table.length for table in seq.tables]  # of what is held anew
        for group in self._states:
            read = self.groups[group].first_live(min(tokens, seq.num_tokens), self.block)
            starts[group] = max(starts[group], read)
            lacking[group] = max(0, need - starts[group])
        shared = [self._is_shared(group, seq) for group in range(len(self.groups))]
        wanted = [lack + copy for lack, copy in zip(lacking, shared, strict=True)]
        if any(want > pool.num_free for want, pool in zip(wanted, self.pools, strict=True)):
            return False
        for group, (table, copy, start) in enumerate(zip(seq.tables, shared, starts, strict=True)):
            if copy:
                self._copy_on_write(seq, group, at)
            while table.length < need:
                table.append(self.allocate(seq, group) if table.length >= start else NONE)
        seq.alone_in = at
        return True

    def expect(self, seq: Sequence) -> None:
        """Have the step keep the block that a sequence which waits is to go on from, if it computes that."""
        if self._states and self.prefix_cache:
            hit, chain = self.prefixes.hit(seq)
            self.prefixes.is_coming(chain, hit)

    def keep_hits(self, seq: Sequence, tokens: int) -> None:
        """Hold the blocks, left out by extend(seq, tokens), that prefix hits go on from: that of the same
        prompt, and of prompts that begin like it as far as is known. Where there are free ones."""
        if not self._states or not self.prefix_cache or tokens <= seq.computed + 1:
            return
        known, of_prompt = min(tokens, seq.num_tokens), (seq.prompt_tokens - 1) // self.block - 1
        chain = self.prefixes.chain(seq, known // self.block)
        for group in self._states:
            table = seq.tables[group]
            for i in range(seq.computed // self.block, self.groups[group].first_live(known, self.block)):
                is_read = i == of_prompt or self.prefixes.is_wanted(chain[i])
                if is_read and table.ids[i] == NONE and self.pools[group].num_free:
                    table.replace(i, self.allocate(seq, group))

    def advance(self, seq: Sequence, computed: int) -> None:
        """Record that tokens up to `computed` are in the cache.

        Blocks that filled are sealed; those that are not read any more, in groups that keep a part of the
        tokens, are given back.
        """
        full_before, full_now = seq.computed // self.block, computed // self.block
        seq.computed = computed
        if self.prefix_cache and full_now > full_before:
            chain = self.prefixes.chain(seq, full_now)
            for group, table, pool in zip(self.groups, seq.tables, self.pools, strict=True):
                for i in range(full_now if group.tail else max(full_before, table.first), full_now):
                    if table.ids[i] != NONE:
                        self._seal(pool, table, i, chain[i])
            self.prefixes.arrive(seq, full_now)
            self.prefixes.remember(chain[full_before:full_now])
        for group, table, pool in zip(self.groups, seq.tables, self.pools, strict=True):
            if group.is_full:
                continue
            first = group.first_live(computed, self.block)
            while table.first < min(first, table.length):
                if table.ids[table.first] != NONE:
                    pool.release(int(table.ids[table.first]))
                table.ids[table.first] = NONE if group.state else 0
                table.first += 1

    def trim(self, seq: Sequence) -> None:
        """Give back the blocks beyond the next token's, which were held for drafts."""
        need = seq.computed // self.block + 1
        for table, pool in zip(seq.tables, self.pools, strict=True):
            while table.length > need:
                pool.release(table.pop())

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
        self.prefixes.arrive(seq, seq.coming.stop)
        for table, pool in zip(seq.tables, self.pools, strict=True):
            for block in reversed(table.live()):
                pool.release(block)
        seq.tables, seq.computed, seq.alone_in = [], 0, None
        if self.on_free is not None:
            self.on_free(seq)

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert the invariants of all pools, given every sequence that holds blocks."""
        holders = [seq for seq in holders if seq.tables]
        for index, pool in enumerate(self.pools):
            pool.check(seq.tables[index] for seq in holders)
        self.prefixes.check(holders)

    def allocate(self, seq: Sequence, group: int) -> int:
        """A free block, for the sequence. Look at the pool's num_free first."""
        pool = self.pools[group]
        evictions = pool.evictions
        block = pool.allocate()
        if pool.evictions > evictions:
            self.log.add(
                "evict", seq.owner, 1, f"it needs one, and in group {group} only cached ones are free"
            )
        return block

    def _is_shared(self, group: int, seq: Sequence) -> bool:
        """Whether somebody else reads the block that its next token goes to, if it holds one."""
        at, table = seq.computed // self.block, seq.tables[group]
        return at < table.length and self.pools[group].is_shared(table.ids.item(at))

    def _lacking(self, group: int, seqs: Iterable[Sequence]) -> int:
        """How many of them have no block of their own for the next token."""
        return sum(
            seq.computed >= seq.tables[group].length * self.block or self._is_shared(group, seq)
            for seq in seqs
        )

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
