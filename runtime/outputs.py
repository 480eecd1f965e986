"""What a step's rows give to requests: tokens, scores and, where they end, completions."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq

from runtime.beams import Beams
from runtime.completion import Completion, Event, FinishReason, Timings, TokenLogprob
from runtime.counters import Counters
from runtime.request import Request
from runtime.rows import Drawn, Results, token_logprob
from runtime.scheduler import Chunk, Scheduler
from runtime.sequence import Sequence


class Outputs:
    """An error of one request ends it alone."""

    def __init__(self, scheduler: Scheduler, counters: Counters) -> None:
        self._scheduler, self._counters, self._log = scheduler, counters, scheduler.cache.log

    def take(self, chunks: Seq[Chunk], results: Results) -> None:
        """chunks: the step's."""
        self._take_scores(results.scoring, results.scores)
        for drawn in results.drawn:
            self._take_samples(drawn)
        for chunk in chunks:
            if chunk.samples and chunk.seq.request.beams is not None:
                self._go_on(chunk.seq.request, chunk.seq.request.beams)

    def finish(self, request: Request, reason: FinishReason | None = None) -> None:
        """End all that is not finished of a request. reason: None where its beams know theirs."""
        if request.beams is None:
            for seq in request.sequences:
                if not seq.finished:
                    self._finish(seq, reason or "length", last_event(seq))
        elif not request.sequences[0].finished:
            for seq in request.sequences:
                self._scheduler.remove(seq)
            for seq, text, ended in request.beams.settle():
                self._counters.output_tokens += len(seq.output.token_ids)
                self._finish(seq, reason or ended, last_event(seq, text=text))

    def fail(self, request: Request, error: Exception) -> None:
        for seq in request.sequences:
            self._scheduler.remove(seq)
        if not request.done:
            self._counters.failed_requests += 1
            self._log.add("fail", (request.number, 0), cause=str(error))
        request.fail(error)

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
            self.finish(request, "length")
        except Exception as error:  # of this request alone
            self.fail(request, error)

    def _take_samples(self, drawn: Drawn) -> None:
        seqs, sampled = drawn.seqs, drawn.sampled
        token_ids = sampled.ids.tolist()
        for row in drawn.rows:
            seq = seqs[row]
            if seq.finished:  # by a row before, of this sample or of another of its request
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
        self._counters.output_tokens += 1
        if logprob is not None:
            output.logprobs.append(logprob)
        if output.first_token_s is None:
            output.first_token_s = time.monotonic()
        ends = token_id in request.ends
        text, stopped = output.push(token_id, silent=ends)
        event = Event(request.prompt_index, seq.sample_index, token_id, text, logprob, None)
        if ends or stopped:
            self._finish(seq, "stop", event, cut=stopped)
        elif seq.num_tokens == seq.max_tokens:
            self._finish(seq, "length", event)
        else:
            request.emit(event)

    def _go_on(self, request: Request, beams: Beams) -> None:
        try:
            beams.go_on(self._scheduler)
            if beams.done:
                self.finish(request)
        except Exception as error:  # of this request alone
            self.fail(request, error)

    def _finish(self, seq: Sequence, reason: FinishReason, event: Event, *, cut: bool = False) -> None:
        """Give its blocks back and its completion out, with its last event, to which the rest of the text
        comes. cut: a stop text ended the text: no rest is left."""
        self._scheduler.remove(seq)
        text = event.text
        if not cut:
            rest, stopped = seq.output.flush()
            text, reason = text + rest, "stop" if stopped else reason
        self._counters.finished_samples += 1
        complete(seq, event._replace(text=text, finish_reason=reason))


def last_event(seq: Sequence, reason: FinishReason | None = None, text: str = "") -> Event:
    """One that comes with no token."""
    return Event(seq.request.prompt_index, seq.sample_index, None, text, None, reason)


def complete(seq: Sequence, event: Event) -> None:
    """Give a sample's last event out, which has the reason, and its completion."""
    assert event.finish_reason is not None
    seq.request.emit(event, _completion(seq, event.finish_reason))


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
        draft=None if output.draft is None else output.draft.frozen(),
    )
