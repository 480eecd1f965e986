"""Blocks of one KV group: which are free, who holds them, which full ones their tokens find again.

Pure bookkeeping; the bytes belong to the executor. A block is *held* (reference count above 0) or free. A
free block that was sealed, that is full and hashed, keeps its hash until it is handed out again, least
recently used first, so that a later request with the same prefix may revive it. Every verb is O(1) and has
its opposite.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from runtime.kv.table import Table


def chain_hash(parent: bytes, tokens: bytes) -> bytes:
    """Hash of a full block: of all tokens up to its end, through its parent's (at first, a root)."""
    return hashlib.blake2b(tokens, digest_size=16, key=parent).digest()


def chain_root(salt: bytes, *keys: bytes) -> bytes:
    """What a chain starts from. keys: whatever else the content depends on; other keys never meet."""
    root = salt
    for key in keys:
        root = chain_hash(root, key)
    return root


@dataclass(frozen=True, slots=True)
class Sealed:
    """What a full block holds: its chained hash, its parent's, and its own token ids as bytes."""

    hash: bytes
    parent: bytes
    tokens: bytes


class BlockPool:
    """`num_blocks` blocks, ids 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self._refs = [0] * num_blocks
        self._sealed: list[Sealed | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, -1, -1))  # free, never sealed; the last is handed out first
        self._idle: OrderedDict[int, None] = OrderedDict()  # free but sealed, least recently used first

    @property
    def num_free(self) -> int:
        return len(self._empty) + len(self._idle)

    @property
    def num_cached(self) -> int:
        return len(self._idle)

    def allocate(self) -> int:
        """A block nobody holds, now held once. Its content is stale. Look at num_free first."""
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self.unseal(block)
            self.evictions += 1
        self._refs[block] = 1
        return block

    def retain(self, block: int) -> None:
        """One more holder of a block that is held, or free but sealed."""
        if self._refs[block] == 0:
            del self._idle[block]
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """One holder less; the last one frees the block."""
        assert self._refs[block] > 0, f"block {block} is free already"
        self._refs[block] -= 1
        if self._refs[block] == 0:
            if self._sealed[block] is None:
                self._empty.append(block)
            else:
                self._idle[block] = None

    def is_shared(self, block: int) -> bool:
        """Whether somebody else reads it, or may find it: it must not be written then."""
        return self._refs[block] > 1 or self._sealed[block] is not None

    def seal(self, block: int, content: Sealed) -> int:
        """Make a full, held block findable. Returns the block that is found: another one, where one with the
        same content was sealed before."""
        found = self.find(content)
        if found is None and self._sealed[block] is None and content.hash not in self._by_hash:
            self._sealed[block] = content
            self._by_hash[content.hash] = block
        return block if found is None else found

    def unseal(self, block: int) -> None:
        content = self._sealed[block]
        assert content is not None, f"block {block} is not sealed"
        self._sealed[block] = None
        del self._by_hash[content.hash]

    def find(self, content: Sealed) -> int | None:
        """The block with this content. A hash that meets other tokens is a miss."""
        block = self._by_hash.get(content.hash)
        return block if block is not None and self._sealed[block] == content else None

    def check(self, tables: Iterable[Table]) -> None:
        """Assert every invariant, given the tables of all holders."""
        held = Counter(block for table in tables for block in table.live())
        assert all(self._refs[b] == held[b] for b in range(self.num_blocks)), (
            "reference counts differ from holders"
        )
        free = [*self._empty, *self._idle]
        assert len(free) == len(set(free)), "a block is free twice"
        assert set(free) == {b for b in range(self.num_blocks) if not held[b]}, (
            "free is not what nobody holds"
        )
        assert all(self._sealed[b] is None for b in self._empty), "an empty block has a hash"
        sealed = {b: s.hash for b, s in enumerate(self._sealed) if s is not None}
        assert self._by_hash == {h: b for b, h in sealed.items()}, (
            "the hash table differs from the sealed blocks"
        )
        assert set(self._idle) <= set(sealed), "an idle block has no hash"
