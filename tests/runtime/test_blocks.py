"""The block allocator: a state machine against a plain model of who holds what, and the cases that matter by
name."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from runtime.kv.blocks import BlockPool, Sealed, chain_hash
from runtime.kv.table import Table


def content(tokens: bytes, parent: bytes = b"salt") -> Sealed:
    return Sealed(chain_hash(parent, tokens), parent, tokens)


class PoolMachine(RuleBasedStateMachine):
    """Holders are tables; what a block holds is modelled by name. A block that is found must hold just
    that."""

    @initialize(num_blocks=st.integers(1, 6))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.tables: list[Table] = []
        self.data: dict[int, bytes] = {}  # what is written in each block

    @precondition(lambda self: self.pool.num_free > 0)
    @rule(word=st.sampled_from([b"a", b"b", b"c", b"d"]), seal=st.booleans())
    def allocate(self, word, seal):
        held = {b for t in self.tables for b in t.live()}
        block = self.pool.allocate()
        assert block not in held
        table = Table()
        table.append(block)
        self.tables.append(table)
        self.data[block] = word
        if seal:
            self.pool.seal(block, content(word))

    @rule(word=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def find(self, word):
        block = self.pool.find(content(word))
        if block is not None:
            assert self.data[block] == word
            self.pool.retain(block)
            table = Table()
            table.append(block)
            self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        for block in table.live():
            self.pool.release(block)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def retain(self, data):
        source = data.draw(st.sampled_from(self.tables))
        table = Table()
        for block in source.live():
            self.pool.retain(block)
            table.append(block)
        self.tables.append(table)

    @invariant()
    def consistent(self):
        if hasattr(self, "pool"):
            self.pool.check(self.tables)
            held = {b for t in self.tables for b in t.live()}
            assert self.pool.num_free == self.pool.num_blocks - len(held)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_least_recently_used_goes_first():
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block, word in zip(blocks, (b"a", b"b", b"c"), strict=True):
        pool.seal(block, content(word))
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release(block)
    pool.retain(pool.find(content(b"b")))  # revived and freed again: now the most recent
    pool.release(blocks[1])
    assert [pool.allocate() for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]
    assert pool.evictions == 3 and pool.find(content(b"a")) is None


def test_a_hash_that_meets_other_tokens_is_a_miss():
    pool = BlockPool(1)
    pool.seal(pool.allocate(), content(b"a"))
    forged = Sealed(content(b"a").hash, b"salt", b"b")
    assert pool.find(forged) is None and pool.find(content(b"a")) == 0


def test_the_chain_tells_histories_apart():
    first, second = content(b"x"), content(b"y")
    assert chain_hash(first.hash, b"z") != chain_hash(second.hash, b"z") != chain_hash(b"other salt", b"z")


def test_check_finds_a_leak():
    pool = BlockPool(2)
    pool.allocate()
    with pytest.raises(AssertionError, match="reference counts"):
        pool.check([])


def test_a_double_release_is_caught():
    pool = BlockPool(1)
    pool.release(pool.allocate())
    with pytest.raises(AssertionError, match="free already"):
        pool.release(0)
