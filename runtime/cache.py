"""The KV cache: one block pool per KV group, and what requests do to all of them at once.

A prefix hit is the longest run of full blocks that every group can serve: a full group needs all of them, a
window group those that the next token can still see. The hit leaves at least the last token to compute.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from runtime.blocks import BlockPool, Sealed, Table, chain_hash
from runtime.sequence import Sequence


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


class Cache:
    """All groups. Block ids are per group; the block size is one for all."""

    def __init__(
        self, groups: Seq[Group], *, block: int = 16, prefix_cache: bool = True, salt: bytes = b""
    ) -> None:
        self.groups, self.block = tuple(groups), block
        self.pools = [BlockPool(group.num_blocks) for group in self.groups]
        self.prefix_cache, self._salt = prefix_cache, salt or b"octavo"
        self.hit_tokens = self.copied_blocks = 0

    def fits(self, tokens: int, step_tokens: int) -> bool:
        """Whether a request of `tokens` tokens can run when it is alone."""
        return all(g.most_blocks(tokens, step_tokens, self.block) <= g.num_blocks for g in self.groups)

    def admit(self, seq: Sequence, step_tokens: int, spare: int = 0) -> bool:
        """Start a request from its longest prefix hit, if its known tokens fit with `spare` blocks to go."""
        chain = self._hit(seq)
        seq.tables = [
            self._open(group, pool, chain) for group, pool in zip(self.groups, self.pools, strict=True)
        ]
        seq.computed = len(chain) * self.block
        for group, pool, table in zip(self.groups, self.pools, seq.tables, strict=True):
            need = group.most_blocks(seq.num_tokens, step_tokens, self.block) - (table.length - table.first)
            if need + spare > pool.num_free:
                self.free(seq)
                return False
        self.hit_tokens += seq.computed
        return True

    def extend(self, seq: Sequence, tokens: int) -> bool:
        """Hold blocks for the first `tokens` tokens, in every group or, where one lacks them, in none."""
        need = -(-tokens // self.block)
        lacking = [need - t.length for t in seq.tables]
        if all([lack <= 0 for lack in lacking]):
            return True
        if any(lack > pool.num_free for lack, pool in zip(lacking, self.pools, strict=True)):
            return False
        for table, pool in zip(seq.tables, self.pools, strict=True):
            while table.length < need:
                table.append(pool.allocate())
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
                    pool.seal(int(table.ids[i]), chain[i])
        for group, table, pool in zip(self.groups, seq.tables, self.pools, strict=True):
            if group.window is None:
                continue
            first = group.first_live(computed, self.block)
            while table.first < min(first, table.length):
                pool.release(int(table.ids[table.first]))
                table.ids[table.first] = 0
                table.first += 1

    def fork(self, parent: Sequence, child: Sequence) -> list[tuple[int, int, int]] | None:
        """Give the child the parent's blocks for all the child's tokens but the last.

        Whole blocks are shared; the rest is to be copied: (group, from, to). None, and nothing is changed, if
        there is no block for the copy.
        """
        computed = child.num_tokens - 1
        shared, rest = divmod(computed, self.block)
        if any(pool.num_free < 1 for pool in self.pools):
            return None
        child.tables, child.computed, copies = [], computed, []
        for index, (group, pool, source) in enumerate(
            zip(self.groups, self.pools, parent.tables, strict=True)
        ):
            table = Table()
            table.skip_to(group.first_live(computed, self.block))
            assert table.first >= source.first, "the parent has given back a block that its fork reads"
            for block in source.ids[table.first : shared].tolist():
                pool.retain(block)
                table.append(block)
            table.append(pool.allocate())
            if rest:
                copies.append((index, int(source.ids[shared]), int(table.ids[shared])))
            child.tables.append(table)
        self.copied_blocks += len(copies)
        return copies

    def free(self, seq: Sequence) -> None:
        """Give everything back, the tail first: it is evicted before the head, which more requests share."""
        for table, pool in zip(seq.tables, self.pools, strict=True):
            for block in reversed(table.live()):
                pool.release(block)
        seq.tables, seq.computed = [], 0

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert the invariants of all pools, given every sequence that holds blocks."""
        tables = [seq.tables for seq in holders if seq.tables]
        for index, pool in enumerate(self.pools):
            pool.check(t[index] for t in tables)

    def _chain(self, seq: Sequence, length: int) -> list[Sealed]:
        """Contents of the first `length` full blocks; kept, because known tokens never change."""
        chain = seq.chain
        while len(chain) < length:
            parent, at = chain[-1].hash if chain else self._salt, len(chain) * self.block
            tokens = seq.ids[at : at + self.block].tobytes()
            chain.append(Sealed(chain_hash(parent, tokens), parent, tokens))
        return chain

    def _hit(self, seq: Sequence) -> list[Sealed]:
        """Contents of the longest prefix of full blocks that every group can serve."""
        if not self.prefix_cache or not self.groups:
            return []
        best = min(seq.num_tokens - 1, seq.hit_limit) // self.block
        chain = self._chain(seq, best)
        while best > 0:  # every group shortens it until all agree
            served = min(
                self._served(g, p, chain, best) for g, p in zip(self.groups, self.pools, strict=True)
            )
            if served == best:
                break
            best = served
        return chain[:best]

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
