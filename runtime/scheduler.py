"""Which tokens of which requests the next step computes.

There are no phases: a request has tokens known and tokens computed, and a step hands out a token budget,
oldest request first, but one token of it is kept for each that comes after. Chunked prefill, decode, prefix
hits, forks and recomputing after preemption are that one arithmetic. When blocks run out, the youngest
running request gives all of its back. Later it goes on from what the host kept of them, or computes them
again where there was no room.

Nobody starves: the order never changes, and the request that is first in it is never preempted for another
and goes on in every step. (Of beams those do that the others wait for.)
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from runtime.kv.cache import Cache
from runtime.kv.swap import Swap
from runtime.limits import Limits
from runtime.sequence import Sequence


@dataclass(slots=True)
class Chunk:
    """`count` tokens of one sequence, from seq.computed on.

    score: the positions among them whose rows score the next prompt token. samples: how many of its last
    tokens' rows are sampled: none, that of its last known token, or the rows of its drafts too, which are its
    last tokens, in seq.ids from seq.num_tokens on. accepted: how many of these turned out to be right.
    """

    seq: Sequence
    count: int
    score: range
    samples: int = 0
    accepted: int = 0

    @property
    def drafts(self) -> int:
        return max(0, self.samples - 1)

    @property
    def right(self) -> int:
        """Tokens of its sequence that are in the cache and right, once the step is done."""
        return self.seq.computed + self.count - self.drafts + self.accepted

    @property
    def may_draft(self) -> bool:
        """Whether drafts can follow: all but its last known token is computed, and more than one may come."""
        seq = self.seq
        return (
            self.samples == self.count == 1
            and not self.score
            and not seq.forks
            and seq.num_tokens + 1 < seq.max_tokens
        )

    def cut(self, drafts: int) -> None:
        """Have so many drafts."""
        self.count -= self.drafts - drafts
        self.samples = 1 + drafts

    @property
    def sampled(self) -> list[Sequence]:
        """Those that take a token from the last row: the sequence, and the other samples of its prompt."""
        if not self.samples:
            return []
        return [self.seq, *(child for child in self.seq.forks if not child.finished)]


# How many drafts each of some chunks gets. Arguments: these, the most for each, and all of the step's.
Wanted = Callable[[Seq[Chunk], Seq[int], Seq[Chunk]], Seq[int]]


class Scheduler:
    """`running` is sorted by order, and so is what is handed out of `waiting`."""

    def __init__(self, cache: Cache, limits: Limits, swap: Swap | None = None) -> None:
        self.cache, self.limits = cache, limits
        self.swap = swap or Swap(cache)
        self.running: list[Sequence] = []
        self.kept: list[Sequence] = []  # pinned prefixes that are computed
        self._waiting: list[tuple[tuple[int, int, int], Sequence]] = []  # a heap
        self._sweep_at = 64  # its size at which those that are finished are taken out

    @property
    def num_waiting(self) -> int:
        return sum(not seq.finished for _, seq in self._waiting)

    @property
    def busy(self) -> bool:
        return bool(self.running or self._waiting)

    @property
    def stuck(self) -> Sequence | None:
        """After an empty step, the first sequence that should have gone on. None, where all that is here fits
        as it was found to when it was submitted."""
        unfinished = [*self.running, *(seq for _, seq in self._waiting if not seq.finished)]
        return min(unfinished, key=lambda seq: seq.order, default=None)

    def add(self, seq: Sequence) -> None:
        heapq.heappush(self._waiting, (seq.order, seq))
        if len(self._waiting) >= self._sweep_at:
            self._waiting = [place for place in self._waiting if not place[1].finished]
            heapq.heapify(self._waiting)
            self._sweep_at = max(64, 2 * len(self._waiting))

    def remove(self, seq: Sequence) -> None:
        """Forget a finished sequence, wherever it is. (In the heap it is skipped when it comes up, or swept
        out when the heap has grown.)"""
        seq.finished = True
        self.swap.drop(seq)
        if seq.kept:
            self.cache.pins.remove(seq)
        for holders in (self.running, self.kept):
            if seq in holders:
                holders.remove(seq)
                self.cache.free(seq)

    def retire(self, seq: Sequence) -> None:
        """Take a running sequence off its blocks, until it is added or forked anew."""
        self.running.remove(seq)
        self.cache.free(seq)

    def keep(self, seq: Sequence) -> None:
        """Let a running sequence that is computed hold its blocks until it is removed."""
        self.running.remove(seq)
        self.kept.append(seq)

    def schedule(self, wanted: Wanted | None = None) -> list[Chunk]:
        """The next step's chunks, at most one per sequence, in order. Their blocks are held.

        wanted: asked for drafts, which take what all others leave of the step and of the blocks.
        """
        chunks = self._next_chunks()
        while not chunks and self.running:  # all wait for peers, for whom the youngest makes room
            if self.running[0] in self.running[-1].peers:
                break
            self._preempt(self.running[-1], "older samples wait for each other")
            chunks = self._next_chunks()
        if not chunks and not self.running and self._waiting:
            chunks = self._next_chunks()  # what is alone now, but lacked a block to copy to, starts anew
        if self._waiting and not self.swap.holds(self._waiting[0][1]):
            self.cache.expect(self._waiting[0][1])
        for chunk in chunks:
            self.cache.keep_hits(chunk.seq, chunk.seq.computed + chunk.count)
        if wanted is not None:
            self._add_drafts(chunks, wanted)
        return chunks

    def fork(self, parent: Sequence, child: Sequence, computed: int) -> None:
        """Start a sequence whose first `computed` tokens are the parent's: from its blocks while there is
        room and it holds them, else later like any request."""
        room = len(self.running) < self.limits.max_requests and parent in self.running
        if room and self.cache.fork(parent, child, computed):
            child.cached_tokens = child.computed
            insort(self.running, child, key=lambda s: s.order)
        else:
            self.add(child)

    def distrust(self, chunks: Iterable[Chunk]) -> None:
        """Copies failed: what the host holds may be wrong, and so may blocks of those that run and are not in
        the step, which fails. All of these are computed again. chunks: the step's."""
        self.swap.forget()
        failing = {id(chunk.seq) for chunk in chunks}
        for seq in [seq for seq in self.running if id(seq) not in failing]:
            self.running.remove(seq)
            self.cache.log.add("preempt", seq.owner, _held(seq), "a copy failed")
            self.cache.free(seq)
            self.add(seq)

    def check(self) -> None:
        """Assert the invariants of the queue and of the blocks that its sequences hold."""
        orders = [seq.order for seq in self.running]
        assert orders == sorted(set(orders)), "running is out of order"
        assert len(orders) <= self.limits.max_requests
        assert all(not seq.tables for _, seq in self._waiting), "a waiting sequence holds blocks"
        for seq in self.running:
            assert 0 <= seq.computed <= seq.num_tokens <= seq.max_tokens
            assert all(t.length * self.cache.block >= seq.computed for t in seq.tables)
        self.cache.check([*self.running, *self.kept])
        self.swap.check()

    def _next_chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        preempted = False
        budget, rows = self.limits.max_step_tokens, self.limits.score_rows
        index = 0
        while index < len(self.running) and budget > 0:
            seq = self.running[index]
            chunk = self._chunk(seq, max(1, budget - len(self.running) + index + 1), rows)
            if chunk is not None:
                before = len(self.running)
                if not self._make_room(seq, chunk.count):
                    preempted = True
                    break
                preempted |= len(self.running) < before
                chunks.append(chunk)
                budget, rows = budget - chunk.count, rows - len(chunk.score)
            index += 1
        while budget > 0 and not preempted and (seq := self._admit()) is not None:
            chunk = self._chunk(seq, budget, rows)
            if chunk is not None and self.cache.extend(seq, seq.computed + chunk.count):
                chunks.append(chunk)
                budget, rows = budget - chunk.count, rows - len(chunk.score)
        return [chunk for chunk in chunks if chunk.seq.tables]  # but those whose peers took them along

    def _chunk(self, seq: Sequence, budget: int, rows: int) -> Chunk | None:
        """As much of the sequence as the budgets and the tails allow; None if nothing."""
        count = min(budget, seq.wanted - seq.computed)
        if count > 1:
            count = min(count, self.cache.chunk_limit(seq, self.running))
        score = range(0)
        if seq.score and seq.scored < seq.prompt_tokens - 1:
            count = min(count, max(0, seq.scored + rows - seq.computed))
            score = range(seq.scored, max(seq.scored, min(seq.computed + count, seq.prompt_tokens - 1)))
        if count <= 0:
            return None
        return Chunk(seq, count, score, int(seq.generates and seq.computed + count == seq.num_tokens))

    def _add_drafts(self, chunks: Seq[Chunk], wanted: Wanted) -> None:
        """Lengthen chunks by drafts, the oldest request's first, and hold blocks for these."""
        left = min(self.limits.draft_rows, self.limits.max_step_tokens - sum([c.count for c in chunks]))
        ready = [chunk for chunk in chunks if chunk.may_draft] if left > 0 else []
        if not ready:
            return
        most = [min(left, chunk.seq.max_tokens - chunk.seq.num_tokens - 1) for chunk in ready]
        for chunk, want, fit in zip(ready, wanted(ready, most, chunks), most, strict=True):
            drafts = min(want, fit, left)
            if drafts > 0:
                drafts = self._hold(chunk.seq, drafts)
                chunk.cut(drafts)
                left -= drafts

    def _hold(self, seq: Sequence, drafts: int) -> int:
        """Hold blocks for drafts; for how many, where fewer are free."""
        if self.cache.extend(seq, seq.num_tokens + drafts):
            return drafts
        return min(table.length for table in seq.tables) * self.cache.block - seq.num_tokens

    def _make_room(self, seq: Sequence, count: int) -> bool:
        """Hold blocks for the next `count` tokens, preempting the youngest; False if that was `seq`."""
        while not self.cache.extend(seq, seq.computed + count):
            victim = self.running[-1]
            self._preempt(victim, f"request {seq.owner[0]}, sample {seq.owner[1]} needs a block")
            if seq in victim.peers:
                return False
        return True

    def _restore(self, seq: Sequence) -> bool:
        """Whether it can start: with what the host holds or, where that finds no room although nothing runs,
        without. It then shares blocks of pinned prefixes, of which the host has copies."""
        if self.swap.restore(seq, self.limits.max_step_tokens, self.running):
            return True
        if not self.running:
            self.swap.drop(seq)
        return not self.running

    def _preempt(self, victim: Sequence, cause: str) -> None:
        """Take a sequence and its peers off their blocks; they wait."""
        for seq in [seq for seq in self.running if seq in victim.peers]:
            self.running.remove(seq)
            self.cache.log.add("preempt", seq.owner, _held(seq), cause)
            # Peers share blocks, and would not when they come back from the host.
            if len(seq.peers) > 1 or not self.swap.hold(seq):
                self.cache.free(seq)
            self.add(seq)

    def _admit(self) -> Sequence | None:
        """The oldest waiting sequence, now running, if there is a place and room for it."""
        while self._waiting and self._waiting[0][1].finished:
            heapq.heappop(self._waiting)
        if not self._waiting or len(self.running) >= self.limits.max_requests:
            return None
        seq = self._waiting[0][1]
        if self.swap.holds(seq) and not self._restore(seq):
            return None
        if not seq.tables and not self.cache.admit(seq, self.limits.max_step_tokens, self.running):
            return None
        heapq.heappop(self._waiting)
        if seq.cached_tokens is None:
            seq.cached_tokens = seq.computed
        insort(self.running, seq, key=lambda s: s.order)
        return seq


def _held(seq: Sequence) -> int:
    """Blocks of all groups."""
    return sum(table.length - table.first for table in seq.tables)
