"""Another artifact's model as the drafter: one that is smaller and knows the same tokens.

Beside each sequence of the target's goes a shadow, which shares its tokens and has blocks of its own. It
computes what it lacks, a prompt over several steps of the target's, then drafts. Drafts count as computed
only once the target has accepted them: what is beyond is written anew.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

import numpy as np

from runtime.executor import Executor, Logits
from runtime.kv.cache import Cache
from runtime.limits import Limits
from runtime.output import Output
from runtime.rows import RowSampler
from runtime.scheduler import Chunk
from runtime.sequence import Sequence
from runtime.speculation.confidence import Confidence
from runtime.step import StepBuffers

PROMPT_TOKENS = 32  # that a sequence lacks, from which on computing them is no part of drafting


class Shadow(Sequence):
    """A sequence of the target's in the drafter's cache. wanted_drafts: of this step; drafted: those there
    are, and of which all but the last are in the cache; sure: enough of the last for another."""

    def __init__(self, seq: Sequence) -> None:
        super().__init__(seq.order, seq.ids[:0], 0, 0, Output(None, ()), salt=seq.salt)
        self.ids, self.max_tokens, self.prompt_tokens = seq.ids, seq.max_tokens, seq.prompt_tokens
        self.request, self.num_tokens = seq.request, seq.num_tokens
        self.wanted_drafts = self.drafted = 0
        self.sure = True

    @property
    def goes_on(self) -> bool:
        """Whether another draft is wanted; where a request says how many, sure or not."""
        return self.drafted < self.wanted_drafts and (
            self.sure or self.request.sampling.draft_tokens is not None
        )

    @property
    def lacks(self) -> int:
        """Known tokens that are not in the cache."""
        return self.num_tokens - self.computed


class EngineDrafter:
    """Owns the executor. limits: of its steps. max_context, vocab_size: of its model.

    setup_s: seconds of the last draft() that went into prompts.
    """

    def __init__(
        self,
        name: str,
        executor: Executor,
        cache: Cache,
        limits: Limits,
        max_context: int,
        vocab_size: int,
    ) -> None:
        self.name, self.cache = name, cache
        self._executor, self._limits = executor, limits
        self._max_context, self._vocab_size = max_context, vocab_size
        self._buffers = StepBuffers(limits, len(cache.groups), max_context, cache.block)
        self._sampler = RowSampler(executor, limits.max_rows, logprobs="all")
        self.confidence = Confidence()
        self.shadows: dict[tuple[int, int, int], Shadow] = {}
        self.setup_s = 0.0

    def draft(self, chunks: Seq[Chunk], wanted: Seq[int]) -> Seq[int]:
        """0 for those whose prompts are not computed yet, or find no blocks."""
        self.setup_s = 0.0
        self.confidence.begin()
        orders = {chunk.seq.order for chunk in chunks}
        found = [self._shadow(c.seq, want, orders) for c, want in zip(chunks, wanted, strict=True)]
        shadows = [shadow for shadow in found if shadow is not None]
        try:
            going = self._catch_up(shadows)
            while going := [s for s in going if s.goes_on and self._extend(s, 1)]:
                self._step([Chunk(shadow, 1, range(0), 1) for shadow in going if shadow.tables])
        finally:
            for shadow in shadows:
                shadow.computed = min(shadow.computed, shadow.num_tokens)
        return [0 if shadow is None else shadow.drafted for shadow in found]

    def settle(self, seq: Sequence) -> None:
        """What of its drafts was right stays computed."""
        shadow = self.shadows.get(seq.order)
        if shadow is None or not shadow.drafted:
            return
        self.confidence.settle(shadow, seq.computed - shadow.num_tokens)
        right = min(seq.computed, shadow.num_tokens + shadow.drafted - 1)
        shadow.drafted = 0
        if right > shadow.computed:
            self.cache.advance(shadow, right)

    def forget(self, seq: Sequence) -> None:
        self._drop(seq.order)

    def close(self) -> None:
        self._executor.close()

    def check(self) -> None:
        """Assert the invariants of its blocks."""
        self.cache.check(self.shadows.values())

    def _shadow(self, seq: Sequence, wanted: int, orders: set[tuple[int, int, int]]) -> Shadow | None:
        """Its shadow, which is to draft so many tokens; None where there can be none. orders: of all that are
        drafted for."""
        most = min(wanted, self._max_context - seq.num_tokens + 1)
        shadow = self.shadows.get(seq.order)
        if most < 1 or not self._knows(seq, 0 if shadow is None else shadow.num_tokens):
            self._drop(seq.order)
            return None
        if shadow is None:
            shadow = Shadow(seq)
            if not self._admit(shadow, orders):
                return None
            self.shadows[seq.order] = shadow
        shadow.num_tokens, shadow.wanted_drafts, shadow.drafted = seq.num_tokens, most, 0
        return shadow

    def _knows(self, seq: Sequence, start: int) -> bool:
        """Whether its model has all tokens from `start` on, and those that the request favours or avoids."""
        known = seq.ids[start : seq.num_tokens]
        biases = [token_id for token_id, _ in seq.request.sampling.biases]
        return max(int(np.max(known, initial=0)), *biases, 0) < self._vocab_size

    def _admit(self, shadow: Shadow, orders: set[tuple[int, int, int]]) -> bool:
        others, step_tokens = list(self.shadows.values()), self._limits.max_step_tokens
        if self.cache.admit(shadow, step_tokens, others):
            return True
        for other in others:  # it may wait for blocks that one computes which is not drafted for any more
            if other.lacks and other.order not in orders:
                self._drop(other.order)
        return self.cache.admit(shadow, step_tokens, list(self.shadows.values()))

    def _catch_up(self, shadows: Seq[Shadow]) -> list[Shadow]:
        """One step of what they lack, the oldest first: those that lack nothing then, with a first draft."""
        chunks: list[Chunk] = []
        budget = self._limits.max_step_tokens
        for shadow in shadows:
            count = min(shadow.lacks, budget)
            if count > 1:
                count = min(count, self.cache.chunk_limit(shadow, self.shadows.values()))
            if count > 0 and shadow.tables and self._extend(shadow, count):
                chunks.append(Chunk(shadow, count, range(0), int(count == shadow.lacks)))
                budget -= count
        chunks = [chunk for chunk in chunks if chunk.seq.tables]  # but those that others took blocks from
        for chunk in chunks:
            self.cache.keep_hits(chunk.seq, chunk.seq.computed + chunk.count)
        start = time.monotonic()
        self._step(chunks)
        if any(chunk.count > PROMPT_TOKENS for chunk in chunks):
            self.setup_s = time.monotonic() - start
        return [shadow for shadow in shadows if shadow.drafted]

    def _step(self, chunks: Seq[Chunk]) -> None:
        """Compute tokens, and draft one for each whose chunk has a sampled row. Known tokens are computed for
        good, drafts until draft() is done."""
        if not chunks:
            return
        self.cache.moves.run(self._executor)
        logits = self._executor.forward(self._buffers.pack(chunks))
        drafting: list[Shadow] = []
        for chunk in chunks:
            shadow = self.shadows[chunk.seq.order]
            if shadow.drafted:
                shadow.computed += 1
            else:
                self.cache.advance(shadow, shadow.computed + chunk.count)
            if chunk.samples:
                drafting.append(shadow)
        self._draw(drafting, logits)

    def _draw(self, shadows: list[Shadow], logits: Logits) -> None:
        if not shadows:
            return
        positions = [shadow.num_tokens + shadow.drafted for shadow in shadows]
        sampled = self._sampler.draw(list(shadows), positions, logits)
        found = zip(shadows, positions, sampled.ids.tolist(), sampled.logprobs.tolist(), strict=True)
        for shadow, position, token_id, logprob in found:
            shadow.ids[position] = token_id
            shadow.drafted += 1
            shadow.sure = self.confidence.goes_on(shadow, logprob)

    def _extend(self, shadow: Shadow, count: int) -> bool:
        """Hold blocks for its next tokens. Where there are none, the youngest go without; False if it is one
        of them."""
        while shadow.tables and not self.cache.extend(shadow, shadow.computed + count):
            self._drop(max(self.shadows))
        return bool(shadow.tables)

    def _drop(self, order: tuple[int, int, int]) -> None:
        shadow = self.shadows.pop(order, None)
        if shadow is not None:
            self.cache.free(shadow)
