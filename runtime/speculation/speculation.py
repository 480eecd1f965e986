"""What a step does with drafts, beside computing them: whom it drafts for, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

import numpy as np

from runtime.errors import one_line
from runtime.log import Log
from runtime.scheduler import Chunk
from runtime.sequence import Sequence
from runtime.speculation.choose import Acceptance
from runtime.speculation.drafter import ConfidentDrafter, Drafter, DrawingDrafter
from runtime.speculation.pace import Pace, Verified
from runtime.speculation.tally import Tally

MOST_FAILURES = 3  # of a drafter in a row


class Speculation:
    """Used by the engine's thread. A drafter that fails costs its drafts alone and, three times in a row, all
    that it might make later.

    total: what came of all drafts. failures: how often it failed. stopped: why there are no more drafts, None
    while there are. verify_steps: that had some. draft_s: seconds in the drafter. held: the step's chunks
    that have blocks for drafts.
    """

    def __init__(
        self,
        drafter: Drafter,
        pace: Pace,
        vocab_size: int,
        log: Log,
        acceptance: Acceptance = "exact",
    ) -> None:
        self.acceptance: Acceptance = acceptance
        self.drafter, self.total = drafter, Tally()
        self._confidence = drafter.confidence if isinstance(drafter, ConfidentDrafter) else None
        self.failures, self.verify_steps, self.draft_s = 0, 0, 0.0
        self.stopped: str | None = None
        self._pace, self._vocab_size, self._log = pace, vocab_size, log
        self._in_a_row = 0
        self.held: list[Chunk] = []
        self._step_draft_s = 0.0

    @property
    def speedup(self) -> float | None:
        """Of all steps so far, see Pace; None where no draft was verified."""
        return self._pace.speedup if self.verify_steps else None

    def wanted(self, ready: Seq[Chunk], most: Seq[int], chunks: Seq[Chunk]) -> Seq[int]:
        """See runtime.scheduler.Wanted."""
        found = [0] * len(ready)
        if self.stopped is None:
            self._guarded(lambda: self._lengths(ready, most, chunks, found), ready)
        return found

    def draft(self, chunks: Seq[Chunk]) -> None:
        """Have the drafts written that were scheduled, and take the chunks down to what there is of them."""
        self.held, self._step_draft_s = [chunk for chunk in chunks if chunk.samples > 1], 0.0
        if not self.held:
            return
        start = time.monotonic()
        samples = sum([chunk.samples - chunk.drafts for chunk in chunks])
        if not self._guarded(lambda: self._draft(self.held, samples), self.held):
            for chunk in self.held:
                chunk.cut(0)
                self.forget(chunk.seq)
        self._step_draft_s = time.monotonic() - start
        self.draft_s += self._step_draft_s

    def settle(self, chunks: Seq[Chunk], tokens: int, seconds: float) -> None:
        """After a step's tokens are in the cache, and before they are given out. tokens: that it computed;
        seconds: that it took, the drafter's included."""
        held, self.held = self.held, []
        if self.stopped is None:
            drafted = [chunk for chunk in held if chunk.samples > 1 and not chunk.seq.finished]
            if self._guarded(lambda: self._settle(chunks, drafted, tokens, seconds), drafted) and drafted:
                self._in_a_row = 0

    def forget(self, seq: Sequence) -> None:
        """It was taken off its blocks."""
        self._pace.forget(seq.order)
        try:
            self.drafter.forget(seq)
        except Exception as error:
            self._failed(error, seq.owner)

    def drawn_from(self, chunk: Chunk) -> np.ndarray | None:
        """The distributions of a chunk's drafts, f64 [chunk.drafts, V]; None where the drafter knows none."""
        if not isinstance(self.drafter, DrawingDrafter):
            return None
        try:
            found = self.drafter.distributions(chunk)
            return None if found is None else found[: chunk.drafts]
        except Exception as error:
            self._failed(error, chunk.seq.owner)
            return None

    def close(self) -> None:
        self.drafter.close()

    def _lengths(self, ready: Seq[Chunk], most: Seq[int], chunks: Seq[Chunk], found: list[int]) -> None:
        """Write lengths: those that requests ask for, and of others what pays."""
        paced: list[int] = []
        for i, chunk in enumerate(ready):
            request = chunk.seq.request
            own = 0 if request.beams is not None else request.sampling.draft_tokens
            if own is None:
                paced.append(i)
            else:
                found[i] = min(own, most[i])
        if not paced:
            return
        samples, tokens = sum([c.samples for c in chunks]), sum([c.count for c in chunks])
        keys, fits = [ready[i].seq.order for i in paced], [most[i] for i in paced]
        lengths = self._pace.lengths(keys, fits, samples, tokens + sum(found))
        for i, length in zip(paced, lengths, strict=True):
            found[i] = length

    def _draft(self, chunks: Seq[Chunk], samples: int) -> None:
        """samples: of the step without drafts."""
        if self._confidence is not None:
            self._confidence.least = self._pace.least_chance(samples, len(chunks))
        wanted = [chunk.drafts for chunk in chunks]
        counts = self.drafter.draft(chunks, wanted)
        for chunk, count, most in zip(chunks, counts, wanted, strict=True):
            if not 0 <= count <= most:
                raise ValueError(f"{count} drafts where {most} were wanted")
            chunk.cut(self._usable(chunk.seq, count))

    def _usable(self, seq: Sequence, count: int) -> int:
        """Drafts before the first that is no token of the model's."""
        ids = seq.ids[seq.num_tokens : seq.num_tokens + count].tolist()
        return next((i for i, token_id in enumerate(ids) if not 0 <= token_id < self._vocab_size), count)

    def _settle(self, chunks: Seq[Chunk], drafted: Seq[Chunk], tokens: int, seconds: float) -> None:
        for chunk in drafted:
            self.drafter.settle(chunk.seq)
        sampled = [chunk for chunk in chunks if chunk.samples]
        verified = [Verified(c.seq.order, c.drafts, c.accepted) for c in drafted]
        plain_s = self._pace.plain_s(len(sampled))
        setup_s = self.drafter.setup_s if self._step_draft_s else 0.0
        draft_s = self._step_draft_s - setup_s
        self._pace.learn(len(sampled), tokens, seconds - draft_s - setup_s, draft_s, verified, setup_s)
        self._count(drafted)
        if plain_s is not None and tokens == sum([c.samples for c in sampled]):
            _count_time(sampled, plain_s, seconds)

    def _count(self, drafted: Seq[Chunk]) -> None:
        for chunk in drafted:
            output = chunk.seq.output
            output.draft = output.draft or Tally()
            for tally in (self.total, output.draft):
                tally.add(chunk.drafts, chunk.accepted)
        self.verify_steps += bool(drafted)

    def _guarded(self, call: Callable[[], None], chunks: Seq[Chunk]) -> bool:
        """Whether it went well."""
        try:
            call()
        except Exception as error:
            self._failed(error, chunks[0].seq.owner if chunks else (0, 0))
            return False
        return True

    def _failed(self, error: Exception, owner: tuple[int, int]) -> None:
        self.failures += 1
        self._in_a_row += 1
        if self._in_a_row == MOST_FAILURES:
            self.stopped = one_line(str(error)) or repr(error)
        self._log.add("draft_failed", owner, cause=str(error) or repr(error))


def _count_time(sampled: Seq[Chunk], plain_s: float, seconds: float) -> None:
    """Of a step that computed no prompt: what its tokens would have taken, and what they took."""
    for chunk in sampled:
        tally = chunk.seq.output.draft
        if tally is not None:
            tally.took((1 + chunk.accepted) * plain_s, seconds)
