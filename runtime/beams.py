"""A request's beam search on the cache: each live beam is a sequence, and goes on as a fork.

All live beams are peers. A step takes the row of each that it has computed; once all of them are computed,
the next ones are chosen. A beam's first continuation goes on in its blocks, others fork from them, and a beam
that has none leaves its place to one of these.
"""

from __future__ import annotations

import time

from runtime.beam import Beam, BeamSearch, Row
from runtime.completion import FinishReason
from runtime.executor import Sampled
from runtime.request import Request
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence


class Beams:
    """The request has `sampling.beams` sequences: places for live beams, and of the first `sampling.n` the
    outputs, which are empty until the end."""

    def __init__(self, request: Request) -> None:
        sampling, first = request.sampling, request.sequences[0]
        self._request, self._live = request, [first]  # best first
        self._rows: dict[Sequence, Row] = {}  # of computed beams; still right when they are preempted
        self._search = BeamSearch(
            sampling.beams,
            request.ends,
            first.max_tokens - first.prompt_tokens,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            alternatives=sampling.logprobs or 0,
        )

    @property
    def done(self) -> bool:
        return self._search.done

    @property
    def width(self) -> int:
        """How many of a row's likeliest tokens are needed, to go on or to be reported."""
        return max(self._search.width, self._request.sampling.logprobs or 0)

    def take(self, seq: Sequence, sampled: Sampled, row: int) -> None:
        """Keep what a live beam's row says until those of the others are there."""
        ids, logprobs = (a[row, : self.width].tolist() for a in (sampled.top_ids, sampled.top_logprobs))
        self._rows[seq] = list(zip(ids, logprobs, strict=True))

    def go_on(self, scheduler: Scheduler) -> None:
        """Choose the next beams, if all live ones are computed. After a step, when all its rows are taken."""
        live = self._live
        if self.done or any(seq.computed < seq.num_tokens for seq in live):
            return
        parents = [live[place] for place in self._search.step([self._rows[seq] for seq in live])]
        self._rows.clear()
        if self.done:
            return
        kept = set(parents)
        for seq in live:
            if seq not in kept:
                scheduler.retire(seq)
        self._live = self._places(scheduler, parents)
        for seq, beam in zip(self._live, self._search.live, strict=True):
            assert beam.token is not None
            seq.append(beam.token.token_id)
            seq.peers = self._live

    def settle(self) -> list[tuple[Sequence, str, FinishReason]]:
        """Write the best texts into the samples' outputs; with each its text, and why it ended if it did."""
        request, count = self._request, self._request.sampling.n
        texts: list[tuple[float | None, Beam]] = [*self._search.outcome()]
        texts += [(None, Beam())] * count  # fewer there are only before the end
        return [
            (seq, *self._write(seq, score, beam))
            for seq, (score, beam) in zip(request.sequences[:count], texts, strict=False)
        ]

    def _places(self, scheduler: Scheduler, parents: list[Sequence]) -> list[Sequence]:
        """A sequence for each beam's continuation: its own, or a free one that forks from it."""
        rest = set(parents)
        free = iter([seq for seq in self._request.sequences if seq not in rest])
        places: list[Sequence] = []
        for parent in parents:
            if parent in rest:
                rest.remove(parent)
                places.append(parent)
            else:
                places.append(next(free))
                _fork(scheduler, parent, places[-1])
        return places

    def _write(self, seq: Sequence, score: float | None, beam: Beam) -> tuple[str, FinishReason]:
        request, output, tokens = self._request, seq.output, beam.tokens()
        texts = [output.push(t.token_id, silent=t.token_id in request.ends)[0] for t in tokens]
        output.score = score
        if request.sampling.logprobs is not None:
            output.logprobs += tokens
        output.started_s = request.sequences[0].output.started_s
        output.first_token_s = time.monotonic() if tokens else None  # none was certain before
        seq.cached_tokens = request.sequences[0].cached_tokens
        ended = bool(tokens) and tokens[-1].token_id in request.ends
        return "".join(texts), "stop" if ended else "length"


def _fork(scheduler: Scheduler, parent: Sequence, child: Sequence) -> None:
    """Start a free sequence, now with the parent's tokens, which are all computed."""
    child.num_tokens, child.chain = parent.num_tokens, parent.chain.copy()
    child.ids[: child.num_tokens] = parent.ids[: parent.num_tokens]
    scheduler.fork(parent, child, parent.computed)
    child.cached_tokens = parent.cached_tokens  # of the prompt
