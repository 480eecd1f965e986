"""The engine without its thread: add a request, step until idle.

One step is schedule, move, draft, pack, forward, sample, advance, take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from typing import Literal

from runtime.beams import Beams
from runtime.counters import Counters
from runtime.errors import EngineError
from runtime.executor import Executor, Logits
from runtime.outputs import Outputs, complete, last_event
from runtime.request import Request
from runtime.rows import Results, RowSampler, score_rows
from runtime.scheduler import Chunk, Scheduler
from runtime.sequence import Sequence
from runtime.speculation.rejecting import Rejecting
from runtime.speculation.speculation import Speculation
from runtime.step import Step, StepBuffers


class Core:
    """Used by one thread. An error of one request ends it alone; a failed forward ends those of its step."""

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        buffers: StepBuffers,
        speculation: Speculation | None = None,
    ) -> None:
        self.executor, self.scheduler, self._buffers = executor, scheduler, buffers
        self.speculation, self._wanted = speculation, None if speculation is None else speculation.wanted
        scheduler.cache.on_free = None if speculation is None else speculation.forget
        rejecting = None
        if speculation is not None and speculation.acceptance == "rejection":
            rejecting = Rejecting(executor, speculation.drawn_from)
        self._sampler = RowSampler(executor, scheduler.limits.max_rows, rejecting=rejecting)
        self.counters, self.log = Counters(), scheduler.cache.log
        self._outputs = Outputs(scheduler, self.counters)

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, request: Request) -> None:
        """Queue it. Samples beyond the first fork from it once the prompt is computed, beams later."""
        first, *others = request.sequences
        if request.sampling.beams > 1:
            request.beams, others = Beams(request), []
        if first.wanted == 0:
            self._outputs.finish(request, "length")
            return
        first.forks = others if first.generates else []
        origin, request.origin = request.origin, None
        if origin is None or first.score:
            self.scheduler.add(first)
        else:
            parent, common = origin
            self.scheduler.fork(parent, first, min(common, parent.computed, first.num_tokens - 1))

    def cancel(self, request: Request) -> None:
        self._end(request, "cancelled")

    def expire(self, request: Request) -> None:
        self._end(request, "timeout")

    def fail(self, request: Request, error: Exception) -> None:
        self._outputs.fail(request, error)

    def step(self) -> bool:
        """Run one step; False if there was nothing to run."""
        start = time.monotonic()
        chunks = self.scheduler.schedule(self._wanted)
        if not chunks:
            self._unstick()
            return False
        try:
            self._move(chunks)
            if self.speculation is not None:
                self.speculation.draft(chunks)
            step = self._buffers.pack(chunks)
            results = self._results(chunks, self._forward(step))
            self._advance(chunks, start)
        except Exception as error:
            for chunk in chunks:
                self.fail(chunk.seq.request, error)
            return True
        self.counters.steps += 1
        self.counters.computed_tokens += len(step.ids)
        if self.speculation is not None:
            self._settle(self.speculation, chunks, len(step.ids), time.monotonic() - start)
        self._outputs.take(chunks, results)
        self.counters.step_s += time.monotonic() - start
        return True

    def pin(self, request: Request) -> None:
        """Queue a prefix that holds its blocks once they are computed, until unpin."""
        self.scheduler.cache.pins.add(request.sequences[0])
        self.scheduler.add(request.sequences[0])

    def unpin(self, request: Request) -> None:
        """Let its blocks go, or stop computing it."""
        seq = request.sequences[0]
        if seq in self.scheduler.kept:
            self.scheduler.remove(seq)
            self.log.add("unpin", seq.owner, seq.num_tokens // self.scheduler.cache.block, "released")
        else:
            self.cancel(request)

    def _keep(self, seq: Sequence) -> None:
        self.scheduler.keep(seq)
        self.log.add("pin", seq.owner, seq.num_tokens // self.scheduler.cache.block, "engine.pin")
        complete(seq, last_event(seq, "length"))

    def _end(self, request: Request, reason: Literal["cancelled", "timeout"]) -> None:
        cause = "asked for" if reason == "cancelled" else f"timeout_s = {request.service.timeout_s}"
        for seq in request.sequences[: request.sampling.n]:
            if not seq.finished:
                self.log.add(reason, seq.owner, seq.num_tokens - seq.prompt_tokens, cause)
        self._outputs.finish(request, reason)

    def _unstick(self) -> None:
        """Fail a request that can never go on, for a fault of the engine's, and not all others with it."""
        stuck = self.scheduler.stuck
        if stuck is not None:
            free = [pool.num_free for pool in self.scheduler.cache.pools]
            what = f"{stuck.computed} of {stuck.num_tokens} tokens, {free} blocks free: it cannot go on"
            self.fail(stuck.request, EngineError(what, where="scheduler", todo="Report it"))

    def _move(self, chunks: Seq[Chunk]) -> None:
        """Copy blocks as the scheduler planned."""
        try:
            self.scheduler.cache.moves.run(self.executor)
        except Exception:
            self.scheduler.distrust(chunks)
            raise

    def _forward(self, step: Step) -> Logits:
        start = time.monotonic()
        logits = self.executor.forward(step)
        self.counters.forward_s += time.monotonic() - start
        return logits

    def _settle(self, speculation: Speculation, chunks: Seq[Chunk], tokens: int, seconds: float) -> None:
        """Give back what was held for drafts that were wrong, and learn."""
        for chunk in speculation.held:
            if not chunk.seq.finished:
                self.scheduler.cache.trim(chunk.seq)
        speculation.settle(chunks, tokens, seconds)

    def _results(self, chunks: Seq[Chunk], logits: Logits) -> Results:
        """What the step's rows say. A request fails whose own rows hold a NaN; of drafts, whose tokens may
        be none of its own, that row and those after it count as if they had not been drafted."""
        sampling, scoring = [c for c in chunks if c.samples], [c for c in chunks if c.score]
        num_sampled = sum([c.samples for c in sampling])
        try:
            scores = score_rows(self.executor, scoring, logits[num_sampled:]) if scoring else []
            rows = logits[:num_sampled] if scoring else logits
            drawn = self._sampler.sample(sampling, rows) if sampling else []  # views: after the scores
            return Results(drawn, scoring, scores)
        except EngineError as error:
            owners = [(c, draft) for c in sampling for draft in range(c.samples)]
            owners += [(c, 0) for c in scoring for _ in c.score]
            broken = self.executor.broken_rows(logits)
            if not broken:
                raise
            for chunk, draft in [owners[row] for row in broken]:
                if draft:
                    chunk.cut(min(chunk.drafts, draft - 1))
                    continue
                nan = EngineError("the model computed NaN or infinity", where="logits", todo=error.todo)
                self.fail(chunk.seq.request, nan)
            keep = [row for row, (c, draft) in enumerate(owners) if not c.seq.finished and draft <= c.drafts]
            return self._results([c for c in chunks if not c.seq.finished], logits[keep])

    def _advance(self, chunks: Seq[Chunk], now: float) -> None:
        """Record what is in the cache, and start the forks of complete prompts. now: when the step began."""
        for chunk in chunks:
            seq = chunk.seq
            if seq.finished:  # it failed in this step
                continue
            if seq.output.started_s is None:
                seq.output.started_s = now
            right = chunk.right if chunk.samples > 1 else seq.computed + chunk.count
            self.scheduler.cache.advance(seq, right)
            if seq.kept and seq.computed == seq.wanted:
                self._keep(seq)
            if chunk.samples:
                for child in seq.forks:
                    if not child.finished:
                        self.scheduler.fork(seq, child, seq.computed)
                seq.forks = []
