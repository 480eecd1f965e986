"""The KV cache as a state machine: whatever sequences do, each finds in every block that it reads what was
computed for just its tokens, nothing is lost, and what could be shared is."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import takewhile

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from runtime.kv.blocks import BlockPool
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.swap import Swap
from runtime.output import Output
from runtime.sequence import Sequence
from tests.examples import examples, happened
from tests.runtime.contents import Contents, Memory

SALTS = (b"", b"", b"other")
indices = st.integers(0, 11)  # into lists of any length, modulo it
sizes = st.tuples(st.integers(0, 3), st.sampled_from((0, 0, 1, -1, 5)))  # blocks, and tokens beside them
on_hosts = st.sampled_from((True, True, False))
counts = st.sampled_from((1, 5, "block", "all"))  # tokens of a chunk
KEPT = (None, None, 1, 7, 16, 17, 40, "tail", "state", "state")  # of a group: all, a window, or a block


class WatchedPool(BlockPool):
    """Tells which block it hands out."""

    def __init__(self, num_blocks, handed_out):
        super().__init__(num_blocks)
        self.handed_out = handed_out

    def allocate(self):
        block = super().allocate()
        self.handed_out(block)
        return block


class CacheMachine(RuleBasedStateMachine):
    """live: sequences that hold blocks; waiting: those that do not. found: per group, which block is findable
    under the name of its last token. promised: such names of blocks that a live sequence will compute; met:
    of those that were computed; wanted: of those of states that somebody waits for, or may.
    """

    def __init__(self, totals: Counter[str]) -> None:
        super().__init__()
        self.totals = totals

    @initialize(
        block=st.sampled_from((8, 16, 32)),
        groups=st.lists(
            st.tuples(st.integers(2, 20), st.sampled_from(KEPT)),
            min_size=1,
            max_size=3,
        ),
        prefix_cache=st.sampled_from((True, True, True, False)),
        places=st.sampled_from((0, 3, 40, 40)),
        step_tokens=st.sampled_from((3, 20, 100, 200)),
    )
    def start(self, block, groups, prefix_cache, places, step_tokens):
        self.block, self.prefix_cache, self.step_tokens = block, prefix_cache, step_tokens
        self.groups = [
            Group(count, None if isinstance(window, str) else window, window == "tail", window == "state")
            for count, window in groups
        ]
        self.cache = Cache(self.groups, block=block, prefix_cache=prefix_cache)
        self.cache.pools[:] = [
            WatchedPool(count, partial(self.handed_out, group)) for group, (count, _) in enumerate(groups)
        ]
        self.swap = Swap(self.cache, places)
        self.contents, self.named = Contents(), dict[Sequence, np.ndarray]()
        self.memory = Memory([count for count, _ in groups], places, block)
        self.live: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.found: list[dict[int, int]] = [{} for _ in groups]
        self.promised: dict[Sequence, list[int]] = {}
        self.met, self.wanted = set[int](), set[int]()
        self.histories = [[i % 3 for i in range(4 * block)]]
        self.number = 0

    # What sequences do.

    @rule(like=indices, keep=sizes, more=sizes, token=st.integers(0, 2), salt=st.sampled_from(SALTS))
    def arrive(self, like, keep, more, token, salt):
        """A prompt whose first tokens are another's."""
        tokens = self.histories[like % len(self.histories)][: self.tokens(keep)] + [token] * self.tokens(more)
        self.waiting.append(self.make(tokens or [token], salt))
        self.admit(len(self.waiting) - 1, alone=True)

    @precondition(lambda self: self.waiting)
    @rule(index=indices, alone=st.booleans())
    def admit(self, index, alone):
        """alone: as if nobody else might need a block soon."""
        seq, others = self.waiting[index % len(self.waiting)], [] if alone else self.live
        if self.swap.holds(seq):
            admitted = self.restore(seq, others)
        else:
            admitted = self.admit_from_a_hit(seq, others)
        if admitted:
            self.waiting.remove(seq)
            self.live.append(seq)
        else:
            assert not seq.tables
            self.totals["not yet"] += 1

    @precondition(lambda self: self.live)
    @rule(
        picks=st.lists(st.tuples(indices, counts), min_size=1, max_size=4),
        token=st.integers(0, 2),
        on_host=on_hosts,
        forks=st.sampled_from((None, None, None, 0, 1)),
        fails=st.sampled_from((False,) * 7 + (True,)),
    )
    def step(self, picks, token, on_host, forks, fails):
        """Chunks of several sequences; who gets no block takes them from the last one.

        forks: the chunk whose sequence is forked before the next chunk is recorded. fails: after its copies.
        """
        chunks: dict[Sequence, int] = {}
        for index, count in picks:
            seq = self.live[index % len(self.live)] if self.live else None
            if seq is None or seq in chunks:
                continue
            count = self.chunk(seq, count, token)
            while count and seq in self.live:
                if self.extend(seq, count):
                    chunks[seq] = count
                    break
                chunks.pop(self.live[-1], None)
                self.preempt(self.live[-1], on_host)
        for seq, count in chunks.items():
            self.keep_hits(seq, count)
        self.cache.moves.run(self.memory)
        for seq in chunks:
            self.read(seq, seq.computed)
        for seq, count in chunks.items():
            self.write(seq, count)
        for seq, count in chunks.items():
            self.read(seq, seq.computed + count)
        for at, (seq, count) in enumerate(chunks.items()):
            if fails:
                self.give_back(seq)
                continue
            self.advance(seq, count)
            if at == forks:
                self.fork_at(seq, seq.computed, token)

    @precondition(lambda self: self.live)
    @rule(count=counts, token=st.integers(0, 2), on_host=on_hosts, times=st.integers(1, 3))
    def step_all(self, count, token, on_host, times):
        for _ in range(times):
            self.step([(index, count) for index in range(len(self.live))], token, on_host, None, False)

    @precondition(lambda self: self.live)
    @rule(index=indices, back=sizes, token=st.integers(0, 2))
    def fork(self, index, back, token):
        """From the end of what is computed, or from before it."""
        seq = self.live[index % len(self.live)]
        self.fork_at(seq, max(0, seq.computed - self.tokens(back)), token)

    @precondition(lambda self: self.live)
    @rule(index=indices, on_host=on_hosts)
    def preempted(self, index, on_host):
        self.preempt(self.live[index % len(self.live)], on_host)
        self.cache.moves.run(self.memory)

    @precondition(lambda self: self.live)
    @rule(index=indices)
    def end(self, index):
        self.give_back(self.live[index % len(self.live)])

    @precondition(lambda self: self.waiting)
    @rule(index=indices)
    def cancel(self, index):
        self.swap.drop(self.waiting.pop(index % len(self.waiting)))

    @precondition(lambda self: any(map(self.swap.holds, self.waiting)))
    @rule(rarely=st.integers(0, 7))
    def forget(self, rarely):
        """A copy failed: nothing that the host holds is trusted."""
        if rarely == 0:
            self.swap.forget()

    # What must come of it.

    def make(self, tokens: list[int], salt: bytes) -> Sequence:
        self.number += 1
        self.histories.append(tokens)
        room = 6 * self.block
        prompt = np.array(tokens[:room], np.int32)
        return Sequence((self.number, self.number, 0), prompt, room, room, Output(None, ()), salt=salt)

    def admit_from_a_hit(self, seq: Sequence, others: list[Sequence]) -> bool:
        """The longest prefix that every group can serve, unless what comes next is soon a hit too."""
        ends = self.names(seq)[self.block - 1 :: self.block][: (seq.num_tokens - 1) // self.block].tolist()
        if not self.prefix_cache:
            ends = []
        hit = max(h for h in range(len(ends) + 1) if self.is_served(ends, h))
        coming = {name for names in self.promised.values() for name in names}
        run = list(takewhile(coming.__contains__, ends[hit : hit + 1]))
        if any(group.state for group in self.groups):
            run = list(takewhile((coming | self.met).__contains__, ends[hit:]))
        waits = any(name in coming for name in run)
        blocks = [
            {found[ends[i]] for i in range(self.first_read(group, hit * self.block), hit)}
            for group, found in enumerate(self.found)
        ]
        rooms = self.rooms(seq, others, blocks)
        admitted = self.cache.admit(seq, self.step_tokens, others)
        assert admitted in ([False] if waits else rooms)
        self.totals["waits for a hit"] += waits
        if admitted:
            assert seq.computed == hit * self.block
            self.promised[seq] = ends[hit:]
            self.wanted.update(run[-1:])
        elif waits:
            self.wanted.add([name for name in run if name in coming][-1])
        return admitted

    def restore(self, seq: Sequence, others: list[Sequence]) -> bool:
        rooms = self.rooms(seq, others, [set() for _ in self.groups])
        restored = self.swap.restore(seq, self.step_tokens, others)
        assert restored in rooms
        self.cache.moves.run(self.memory)
        return restored

    def rooms(self, seq: Sequence, others: list[Sequence], blocks: list[set[int]]) -> list[bool]:
        """Whether it may start: it must not without room for its tokens and a block for each of the others,
        of tails for each that lacks one, and must with room for all that may come of all. blocks: those that
        it finds, per group."""
        most = sum((s.max_tokens - s.num_tokens) // self.block + 1 for s in [seq, *others])
        left = [
            group.num_blocks - len(self.held(g) | blocks[g]) - self.need(seq, group) + len(blocks[g])
            for g, group in enumerate(self.groups)
        ]
        least = [sum(not g.tail or self.lacks(i, s) for s in others) for i, g in enumerate(self.groups)]
        fits = all(free >= kept for free, kept in zip(left, least, strict=True))
        return [room for room in (False, True) if (fits if room else min(left) < most)]

    def lacks(self, group: int, seq: Sequence) -> bool:
        """Whether the sequence holds no block that is its own for the next token."""
        at, table = seq.computed // self.block, seq.tables[group]
        return at >= table.length or self.is_read_by_others(group, seq, int(table.ids[at]))

    def chunk(self, seq: Sequence, count: int | str, token: int) -> int:
        """Tokens to compute; where all known ones are, some become known."""
        count = {"block": self.block, "all": 6 * self.block}.get(count, count)
        if seq.computed == seq.num_tokens:
            for _ in range(min(count, self.block, seq.max_tokens - seq.num_tokens)):
                seq.append(token)
        return min(count, seq.num_tokens - seq.computed, self.step_tokens)

    def extend(self, seq: Sequence, count: int) -> bool:
        """In every group what lacks, and a copy of what others may read; or nothing in any."""
        at, need = seq.computed // self.block, -(-(seq.computed + count) // self.block)
        wanted = []
        for group, table in enumerate(seq.tables):
            copied = at < table.length and self.is_read_by_others(group, seq, int(table.ids[at]))
            lacking = max(0, need - table.length)
            wanted.append((min(lacking, 1) if self.groups[group].state else lacking) + copied)
        fits = all(
            want <= group.num_blocks - len(self.held(g))
            for g, (want, group) in enumerate(zip(wanted, self.groups, strict=True))
        )
        before = [table.live() for table in seq.tables]
        extended = self.cache.extend(seq, seq.computed + count)
        assert extended == fits
        if not extended:
            assert before == [table.live() for table in seq.tables]
        return extended

    def keep_hits(self, seq: Sequence, count: int) -> None:
        """Where there is room, a state's blocks are held that prompts which begin alike go on from."""
        names, of_prompt = self.names(seq), (seq.prompt_tokens - 1) // self.block - 1
        self.cache.keep_hits(seq, seq.computed + count)
        for i in range(seq.computed // self.block, (seq.computed + count) // self.block):
            wanted = i == of_prompt or names[(i + 1) * self.block - 1] in self.wanted
            for group, pool in enumerate(self.cache.pools):
                held = seq.tables[group].ids[i] >= 0
                assert held or not wanted or not self.prefix_cache or not pool.num_free, "a hit is lost"
                self.totals["kept for a hit"] += held and wanted and self.groups[group].state
                self.totals["left out"] += not held

    def write(self, seq: Sequence, count: int) -> None:
        names = self.names(seq)
        for group, table in enumerate(seq.tables):
            for p in range(seq.computed, seq.computed + count):
                block, memory = int(table.ids[p // self.block]), self.memory.blocks[group]
                if block < 0:
                    assert self.groups[group].state
                    continue
                assert not self.is_read_by_others(group, seq, block), "a block that others read is written"
                memory[block, p % self.block] = names[p]
                if p % self.block == 0:
                    memory[block, self.block] = self.before(seq, p)

    def read(self, seq: Sequence, computed: int) -> None:
        """Every position that a token at seq.computed or later sees, up to `computed`."""
        names = self.names(seq)[:computed]
        for group, table in enumerate(seq.tables):
            first = self.first_seen(group, computed if self.groups[group].state else seq.computed)
            assert table.first * self.block <= first, "a block that is read was given back"
            p = np.arange(first, computed)
            blocks = table.ids[: table.length][p // self.block]
            assert (blocks >= 0).all(), "a block that is read was left out"
            assert (self.memory.blocks[group][blocks, p % self.block] == names[first:]).all()
            if self.groups[group].state and computed:
                assert self.memory.blocks[group][blocks[0], self.block] == self.before(seq, first)

    def advance(self, seq: Sequence, count: int) -> None:
        """Blocks that filled are findable, under the older one of two with the same content."""
        before, names = seq.computed // self.block, self.names(seq)
        own = [table.ids[: table.length].tolist() for table in seq.tables]
        self.cache.advance(seq, seq.computed + count)
        for i in range(before, seq.computed // self.block if self.prefix_cache else 0):
            end = int(names[(i + 1) * self.block - 1])
            self.met.add(end)
            if end in self.promised.get(seq, []):
                self.promised[seq].remove(end)
            for group, table in enumerate(seq.tables):
                if self.groups[group].tail or own[group][i] < 0:
                    continue  # nobody looks there, or there is none
                block = self.found[group].setdefault(end, own[group][i])
                assert i < table.first or table.ids[i] == block, "what could be shared is not"
                self.totals["found its like"] += block != own[group][i]
        for group, table in enumerate(seq.tables):
            assert table.first == min(self.first_read(group, seq.computed), table.length)

    def fork_at(self, parent: Sequence, computed: int, token: int) -> None:
        tokens = parent.ids[:computed].tolist()
        child = self.make(tokens + [token] * (computed % 2 or not computed), parent.salt)
        starts = computed > 0 and all(
            table.first <= self.first_read(group, computed) and len(self.held(group)) < pool.num_blocks
            for group, (table, pool) in enumerate(zip(parent.tables, self.cache.pools, strict=True))
        )
        assert self.cache.fork(parent, child, computed) == starts
        if not starts:
            assert not child.tables
            self.waiting.append(child)
            return
        self.live.append(child)
        assert child.computed == computed
        self.totals["fork inside a block"] += computed % self.block > 0

    def preempt(self, seq: Sequence, on_host: bool) -> None:
        if not on_host or not self.swap.hold(seq):
            self.cache.free(seq)
        self.live.remove(seq)
        self.promised.pop(seq, None)
        self.waiting.append(seq)

    def give_back(self, seq: Sequence) -> None:
        self.cache.free(seq)
        self.live.remove(seq)
        self.promised.pop(seq, None)

    # The plain model.

    def handed_out(self, group: int, block: int) -> None:
        assert block not in self.held(group), "a block that is held was handed out"
        self.found[group] = {name: b for name, b in self.found[group].items() if b != block}

    def tokens(self, size: tuple[int, int]) -> int:
        blocks, beside = size
        return max(0, blocks * self.block + beside)

    def names(self, seq: Sequence) -> np.ndarray:
        """Of its known tokens; kept, because they never change."""
        names = self.named.get(seq)
        if names is None or len(names) < seq.num_tokens:
            names = self.named[seq] = self.contents.of(seq.salt, seq.ids[: seq.num_tokens].tolist())
        return names

    def before(self, seq: Sequence, position: int) -> int:
        """The name of the tokens before a position."""
        return int(self.names(seq)[position - 1]) if position else self.contents.start(seq.salt)

    def need(self, seq: Sequence, group: Group) -> int:
        return group.most_blocks(seq.num_tokens, self.step_tokens, self.block)

    def first_seen(self, group: int, position: int) -> int:
        """The first position that the token at a position sees."""
        if self.groups[group].tail:
            return position // self.block * self.block
        if self.groups[group].state:
            return max(0, position - 1) // self.block * self.block
        window = self.groups[group].window
        return 0 if window is None else max(0, position - window + 1)

    def first_read(self, group: int, position: int) -> int:
        """The first block that the token at a position sees."""
        return self.first_seen(group, position) // self.block

    def held(self, group: int) -> set[int]:
        return {block for seq in self.live for block in seq.tables[group].live()}

    def is_read_by_others(self, group: int, seq: Sequence, block: int) -> bool:
        others = (other.tables[group].live() for other in self.live if other is not seq)
        return block in self.found[group].values() or any(block in blocks for blocks in others)

    def is_served(self, ends: list[int], hit: int) -> bool:
        return all(
            ends[i] in found
            for group, found in enumerate(self.found)
            for i in range(self.first_read(group, hit * self.block), hit)
        )

    @invariant()
    def consistent(self):
        if not hasattr(self, "cache"):
            return
        self.cache.check(self.live)
        self.swap.check()
        coming = {name for names in self.promised.values() for name in names}
        self.wanted &= coming
        assert self.cache.prefixes.coming.total() == sum(map(len, self.promised.values()))
        assert self.cache.log.amounts["evict"] == sum(pool.evictions for pool in self.cache.pools)
        for seq in self.live:
            self.read(seq, seq.computed)
            for group, table in zip(self.groups, seq.tables, strict=True):
                most = 1 if group.tail else self.need(seq, group)
                assert table.length - table.first <= most, "more than was planned for it"
        for group, pool in enumerate(self.cache.pools):
            held, found = self.held(group), self.found[group]
            assert pool.num_free == pool.num_blocks - len(held)
            assert pool.num_cached == len(set(found.values()) - held), "a findable block was lost"
            for name, block in found.items():
                assert self.memory.blocks[group][block, self.block - 1] == name

    def teardown(self):
        if not hasattr(self, "cache"):
            return
        for seq in list(self.live):
            self.give_back(seq)
        self.consistent()
        assert not self.cache.prefixes.coming
        self.totals.update(self.cache.log.events)


HAPPENS = ("prefix_hit", "fork", "fork inside a block", "copy_on_write", "evict", "swap_out", "swap_in",
           "not yet", "waits for a hit", "found its like", "left out", "kept for a hit")  # fmt: skip


def test_every_sequence_reads_its_own_tokens(record_property):
    totals: Counter[str] = Counter()
    run_state_machine_as_test(partial(CacheMachine, totals), settings=examples(120, steps=60))
    record_property("totals", happened(totals, HAPPENS))


def sequence(number: int, tokens: list[int]) -> Sequence:
    return Sequence((number, number, 0), np.array(tokens, np.int32), 16, 64, Output(None, ()))


def run(cache: Cache, seq: Sequence) -> None:
    assert cache.admit(seq, 64) and cache.extend(seq, seq.num_tokens)
    cache.advance(seq, seq.num_tokens)


def test_what_comes_back_from_the_host_may_evict():
    cache = Cache([Group(2)], block=8)
    swap = Swap(cache, 2)
    first, second = sequence(1, [1] * 16), sequence(2, [2] * 16)
    run(cache, first)
    assert swap.hold(first)
    run(cache, second)
    cache.free(second)
    assert swap.restore(first, 64, [])
    assert cache.log.events["evict"] == cache.pools[0].evictions == 4


def test_the_head_of_what_is_given_back_is_found_longest():
    cache = Cache([Group(4)], block=8)
    first = sequence(1, [1] * 24)
    run(cache, first)
    cache.free(first)
    second = sequence(2, [2] * 16)
    run(cache, second)  # takes the fourth block and evicts one
    cache.free(second)
    again = sequence(3, [1] * 24)
    assert cache.admit(again, 0) and again.computed == 16
