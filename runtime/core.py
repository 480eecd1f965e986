"""The engine without its thread: add a request, step until idle.

One step is schedule, pack, forward, sample, advance.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal

from runtime.beams import Beams
from runtime.completion import Completion, Event, FinishReason, Timings, TokenLogprob
from runtime.errors import EngineError
from runtime.executor import Executor, Logits, Sampled
from runtime.request import Request
from runtime.rows import Drawn, RowSampler, score_rows, token_logprob
from runtime.scheduler import Chunk, Scheduler
from runtime.sequence import Sequence
from runtime.step import Step, StepBuffers


@dataclass
class Counters:
    """What the engine has done since it was loaded."""

    steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    finished_samples: int = 0
    failed_requests: int = 0
    step_s: float = 0.0  # spent in steps, and of that
    forward_s: float = 0.0  # in the executor's forward


@dataclass(frozen=True, slots=True)
class Results:
    """What a step's rows gave: tokens of sequences, scores by position of `scoring`."""

    drawn: Seq[Drawn]
    scoring: Seq[Chunk]
    scores: Seq[TokenLogprob]


class Core:
    """Used by one thread. An error of one request ends it alone; a failed forward ends those of its step."""

    def __init__(self, executor: Executor, scheduler: Scheduler, buffers: StepBuffers) -> None:
        self.executor, self.scheduler, self._buffers = executor, scheduler, buffers
        self._sampler = RowSampler(executor, scheduler.limits.max_rows)
        self.counters, self.log = Counters(), scheduler.cache.log

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def add(self, request: Request) -> None:
        """Queue it. Samples beyond the first fork from it once the prompt is computed, beams later."""
        first, *others = request.sequences
        if request.sampling.beams > 1:
            request.beams, others = Beams(request), []
        if first.wanted == 0:
            self._finish_all(request, "length")
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
        for seq in request.sequences:
            self.scheduler.remove(seq)
        if not request.done:
            self.counters.failed_requests += 1
            self.log.add("fail", (request.number, 0), cause=str(error))
        request.fail(error)

    def step(self) -> bool:
        """Run one step; False if there was nothing to run."""
        start = time.monotonic()
        chunks = self.scheduler.schedule()
        if not chunks:
            self._unstick()
            return False
        step = self._buffers.pack(chunks)
        try:
            self._move(chunks)
            results = self._results(chunks, self._forward(step))
            self._advance(chunks, start)
        except Exception as error:
            for chunk in chunks:
                self.fail(chunk.seq.request, error)
            return True
        self.counters.steps += 1
        self.counters.computed_tokens += len(step.ids)
        self._take_scores(results.scoring, results.scores)
        for seqs, sampled in results.drawn:
            self._take_samples(seqs, sampled)
        for chunk in chunks:
            if chunk.sample and chunk.seq.request.beams is not None:
                self._go_on(chunk.seq.request, chunk.seq.request.beams)
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
            self.log.add("unpin", seq.owner, seq.num_tokens // self.scheduler.cache.block)
        else:
            self.cancel(request)

    def _keep(self, seq: Sequence) -> None:
        self.scheduler.keep(seq)
        self.log.add("pin", seq.owner, seq.num_tokens // self.scheduler.cache.block)
        self._complete(seq, "length")

    def _end(self, request: Request, reason: Literal["cancelled", "timeout"]) -> None:
        for seq in request.sequences[: request.sampling.n]:
            if not seq.finished:
                self.log.add(reason, seq.owner, seq.num_tokens - seq.prompt_tokens)
        self._finish_all(request, reason)

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

    def _results(self, chunks: Seq[Chunk], logits: Logits) -> Results:
        """What the step's rows say. A request fails whose own rows hold a NaN."""
        sampling, scoring = [c for c in chunks if c.sample], [c for c in chunks if c.score]
        try:
            scores = score_rows(self.executor, scoring, logits[len(sampling) :]) if scoring else []
            rows = logits[: len(sampling)] if scoring else logits
            drawn = self._sampler.sample(sampling, rows) if sampling else []  # views: after the scores
            return Results(drawn, scoring, scores)
        except EngineError as error:
            owners = sampling + [c for c in scoring for _ in c.score]
            broken = self.executor.broken_rows(logits)
            if not broken:
                raise
            for row in broken:
                nan = EngineError("the model computed NaN or infinity", where="logits", todo=error.todo)
                self.fail(owners[row].seq.request, nan)
            keep = [row for row, owner in enumerate(owners) if not owner.seq.finished]
            return self._results([c for c in chunks if not c.seq.finished], logits[keep])

    def _advance(self, chunks: Seq[Chunk], now: float) -> None:
        """Record what is in the cache, and start the forks of complete prompts. now: when the step began."""
        for chunk in chunks:
            seq = chunk.seq
            if seq.finished:  # it failed in this step
                continue
            if seq.output.started_s is None:
                seq.output.started_s = now
            self.scheduler.cache.advance(seq, seq.computed + chunk.count)
            if seq.kept and seq.computed == seq.wanted:
                self._keep(seq)
            if chunk.sample:
                for child in seq.forks:
                    if not child.finished:
                        self.scheduler.fork(seq, child, seq.computed)
                seq.forks = []

    def _take_scores(self, chunks: Seq[Chunk], scores: Seq[TokenLogprob]) -> None:
        at = 0
        for chunk in chunks:
            seq = chunk.seq
            seq.output.prompt_logprobs += scores[at : at + len(chunk.score)]
            at += len(chunk.score)
            seq.scored = chunk.score.stop
            if not seq.generates and seq.computed >= seq.wanted:
                self._finish_scored(seq.request)

    def _finish_scored(self, request: Request) -> None:
        try:
            self._finish_all(request, "length")
        except Exception as error:  # of this request alone
            self.fail(request, error)

    def _take_samples(self, seqs: Seq[Sequence], sampled: Sampled) -> None:
        token_ids = sampled.ids.tolist()
        for row, seq in enumerate(seqs):
            if seq.finished:  # its request failed while another sample of it was taken
                continue
            try:
                if seq.request.beams is not None:
                    seq.request.beams.take(seq, sampled, row)
                    continue
                width = seq.request.sampling.logprobs
                logprob = None if width is None else token_logprob(sampled, row, width)
                self._take(seq, token_ids[row], logprob)
            except Exception as error:  # of this request alone
                self.fail(seq.request, error)

    def _take(self, seq: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        """Add a sampled token to its sequence, and finish that if it was the last."""
        request, output = seq.request, seq.output
        seq.append(token_id)
        self.counters.output_tokens += 1
        if logprob is not None:
            output.logprobs.append(logprob)
        if output.first_token_s is None:
            output.first_token_s = time.monotonic()
        ends = token_id in request.ends
        text, stopped = output.push(token_id, silent=ends)
        if ends or stopped:
            self._finish(seq, "stop", token_id, text, logprob, cut=stopped)
        elif seq.num_tokens == seq.max_tokens:
            self._finish(seq, "length", token_id, text, logprob)
        else:
            request.emit(Event(request.prompt_index, seq.sample_index, token_id, text, logprob, None))

    def _go_on(self, request: Request, beams: Beams) -> None:
        try:
            beams.go_on(self.scheduler)
            if beams.done:
                self._finish_all(request)
        except Exception as error:  # of this request alone
            self.fail(request, error)

    def _finish_all(self, request: Request, reason: FinishReason | None = None) -> None:
        """End all that is not finished of a request. reason: None where its beams know theirs."""
        if request.beams is None:
            for seq in request.sequences:
                if not seq.finished:
                    self._finish(seq, reason or "length")
        elif not request.sequences[0].finished:
            for seq in request.sequences:
                self.scheduler.remove(seq)
            for seq, text, ended in request.beams.settle():
                self.counters.output_tokens += len(seq.output.token_ids)
                self._finish(seq, reason or ended, text=text)

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_id: int | None = None,
        text: str = "",
        logprob: TokenLogprob | None = None,
        *,
        cut: bool = False,
    ) -> None:
        """Give its blocks back and its completion out. cut: a stop text ended the text: no rest is left."""
        self.scheduler.remove(seq)
        if not cut:
            rest, stopped = seq.output.flush()
            text, reason = text + rest, "stop" if stopped else reason
        self.counters.finished_samples += 1
        self._complete(seq, reason, token_id, text, logprob)

    def _complete(
        self,
        seq: Sequence,
        reason: FinishReason,
        token_id: int | None = None,
        text: str = "",
        logprob: TokenLogprob | None = None,
    ) -> None:
        request = seq.request
        event = Event(request.prompt_index, seq.sample_index, token_id, text, logprob, reason)
        request.emit(event, _completion(seq, reason))


def _completion(seq: Sequence, reason: FinishReason) -> Completion:
    request, output = seq.request, seq.output
    sampling, start = request.sampling, request.submitted_s
    since = [None if at is None else at - start for at in (output.started_s, output.first_token_s)]
    scores = request.sequences[0].output.prompt_logprobs
    return Completion(
        prompt_index=request.prompt_index,
        sample_index=seq.sample_index,
        text=output.text,
        token_ids=output.token_ids,
        finish_reason=reason,
        logprobs=None if sampling.logprobs is None else output.logprobs,
        prompt_logprobs=None if sampling.prompt_logprobs is None else scores,
        prompt_token_ids=seq.ids[: seq.prompt_tokens].tolist(),
        cached_tokens=seq.cached_tokens or 0,
        seed=request.seed,
        timings=Timings(since[0], since[1], time.monotonic() - start),
        score=output.score,
    )
