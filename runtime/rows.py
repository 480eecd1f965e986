"""The rows of a step's logits: which parameters each sampled row has, and what each scored row says."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from runtime.completion import TokenLogprob
from runtime.errors import EngineError
from runtime.executor import Executor, Forward, Logits, SampleArgs, Sampled
from runtime.penalties import Adjustment, sample_adjusted
from runtime.scheduler import Chunk
from runtime.sequence import Sequence
from runtime.speculation.rejecting import Rejecting

Logprobs = Literal["asked", "all", "none"]
Found = tuple[list[Sequence], Sampled]  # rows, by whose they are


class Drawn(NamedTuple):
    """Rows that were sampled, and whose each is. rows: those to take, in this order; left out are those that
    come after a draft that was wrong."""

    seqs: list[Sequence]
    sampled: Sampled
    rows: Seq[int]


@dataclass(frozen=True, slots=True)
class Results:
    """What a step's rows say: tokens of sequences, and scores in the order of `scoring`'s ranges."""

    drawn: Seq[Drawn]
    scoring: Seq[Chunk]
    scores: Seq[TokenLogprob]


class RowSampler:
    """Samples rows. Parameters stay from step to step, as long as the rows are of the same sequences.

    max_rows: what the executor takes at once. logprobs: whose tokens get them: those of requests that ask,
    "all", or "none".
    rejecting: what accepts drafts; None: that a row gives the same token.
    """

    def __init__(
        self,
        executor: Forward,
        max_rows: int,
        *,
        logprobs: Logprobs = "asked",
        rejecting: Rejecting | None = None,
    ) -> None:
        self._executor, self._max_rows = executor, max_rows
        self._logprobs: Logprobs = logprobs
        self._rejecting = rejecting
        self._orders: list[tuple[int, int, int]] = []  # of the last rows' sequences, which may go meanwhile
        self._args = SampleArgs.greedy(0, 0)
        self._adjusted: list[int] = []  # rows that penalties or biases change

    def sample(self, chunks: Seq[Chunk], logits: Logits) -> list[Drawn]:
        """A token for each sequence that takes one from these chunks' sampled rows, which logits are: the
        chunk's own, and all samples of a prompt from the same row. Says how many drafts are accepted."""
        forks = any([c.seq.forks for c in chunks])
        if not forks and len(logits) == len(chunks):
            seqs = [c.seq for c in chunks]
            sampled = self.draw(seqs, [seq.num_tokens for seq in seqs], logits)
            return [Drawn(seqs, sampled, range(len(seqs)))]
        places = _places(chunks)
        if forks:
            parts = range(0, len(places), self._max_rows)
            found = [self._part(places[at : at + self._max_rows], logits) for at in parts]
        else:
            seqs = [place.seq for place in places]
            found = [(seqs, self.draw(seqs, [place.position for place in places], logits))]
        if self._rejecting is not None:
            return _accepted(chunks, *self._judge(self._rejecting, chunks, found, logits))
        return _accepted(chunks, found, {})

    def _judge(
        self, rejecting: Rejecting, chunks: Seq[Chunk], found: Seq[Found], logits: Logits
    ) -> tuple[Seq[Found], dict[Sequence, int]]:
        """Copies of what was found, with other tokens where the rule says so; and of the chunks that it was
        asked of, how many drafts it accepts."""
        found = [(seqs, _copy(sampled)) for seqs, sampled in found]
        ids = [(sampled, row) for seqs, sampled in found for row in range(len(seqs))]
        accepted: dict[Sequence, int] = {}
        at = row = 0
        for c in chunks:
            if rejecting.judges(c):
                token_ids, logprobs = rejecting.judge(c, logits[row : row + c.samples])
                accepted[c.seq] = len(token_ids) - 1
                for (sampled, place), token_id, logprob in zip(ids[at:], token_ids, logprobs, strict=False):
                    sampled.ids[place], sampled.logprobs[place] = token_id, logprob
            at, row = at + max(c.samples, len(c.sampled)), row + c.samples
        return found, accepted

    def _part(self, places: list[Place], logits: Logits) -> Found:
        """Copies: they are gone when the next part is sampled."""
        seqs = [place.seq for place in places]
        rows = logits[np.array([place.row for place in places])]
        sampled = self.draw(seqs, [place.position for place in places], rows)
        return seqs, _copy(sampled)

    def draw(self, seqs: list[Sequence], positions: list[int], logits: Logits) -> Sampled:
        """A token for each row. positions: that the tokens take; those before are in seq.ids."""
        orders = [seq.order for seq in seqs]
        if orders == self._orders:
            self._args.position[:] = positions
        else:
            self._orders, self._args = orders, _arguments(seqs, positions, self._logprobs)
            self._adjusted = [row for row, seq in enumerate(seqs) if seq.request.sampling.adjusts]
        if not self._adjusted:
            return self._executor.sample(logits, self._args)
        adjustments = [_adjustment(seqs[row], row, positions[row]) for row in self._adjusted]
        return sample_adjusted(self._executor, logits, self._args, adjustments)


def _copy(sampled: Sampled) -> Sampled:
    arrays = (sampled.ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
    return Sampled(*(array.copy() for array in arrays))


class Place(NamedTuple):
    """Of a token to come: the row of logits that gives it, and its position."""

    seq: Sequence
    row: int
    position: int


def _places(chunks: Seq[Chunk]) -> list[Place]:
    places: list[Place] = []
    row = 0
    for c in chunks:
        places += [Place(seq, row, seq.num_tokens) for seq in c.sampled]
        places += [Place(c.seq, row + draft, c.seq.num_tokens + draft) for draft in range(1, c.samples)]
        row += c.samples
    return places


def _accepted(chunks: Seq[Chunk], found: Seq[Found], judged: Mapping[Sequence, int]) -> list[Drawn]:
    """The rows to take: a chunk's first, and each whose drafts before are what the rows before it gave.

    judged: how many drafts of some sequences are right, whatever their rows gave.
    """
    token_ids = [token_id for _, sampled in found for token_id in sampled.ids.tolist()]
    rows: list[int] = []
    at = 0
    for c in chunks:
        if c.samples > 1:
            drafts = c.seq.ids[c.seq.num_tokens :][: c.drafts].tolist()
            c.accepted = judged[c.seq] if c.seq in judged else _equal(drafts, token_ids[at:])
            rows += range(at, at + 1 + c.accepted)
            at += c.samples
        else:
            rows += range(at, at + len(c.sampled))
            at += len(c.sampled)
    drawn: list[Drawn] = []
    at = 0
    for seqs, sampled in found:
        drawn.append(Drawn(seqs, sampled, [row - at for row in rows if at <= row < at + len(seqs)]))
        at += len(seqs)
    return drawn


def _equal(drafts: Seq[int], token_ids: Seq[int]) -> int:
    """How many of the drafts, from the first on, are these tokens."""
    pairs = zip(drafts, token_ids, strict=False)
    return next((i for i, (draft, token_id) in enumerate(pairs) if draft != token_id), len(drafts))


def _adjustment(seq: Sequence, row: int, position: int) -> Adjustment:
    """Of a row that gives the token at a position."""
    return Adjustment(row, seq.request.sampling, seq.ids[:position], seq.prompt_tokens)


def _arguments(seqs: Seq[Sequence], positions: Seq[int], logprobs: Logprobs) -> SampleArgs:
    samplings = [seq.request.sampling for seq in seqs]
    return SampleArgs(
        temperature=np.array([s.temperature for s in samplings], np.float32),
        top_k=np.array([s.top_k for s in samplings], np.int32),
        top_p=np.array([s.top_p for s in samplings], np.float32),
        min_p=np.array([s.min_p for s in samplings], np.float32),
        seed=np.array([seq.request.seed for seq in seqs], np.uint64),
        sample_index=np.array([seq.sample_index for seq in seqs], np.int32),
        position=np.array(positions, np.int32),
        num_top=max(_num_top(seq) for seq in seqs) if logprobs == "asked" else 0,
        logprobs=logprobs == "all"
        or (logprobs == "asked" and any(s.logprobs is not None for s in samplings)),
    )


def _num_top(seq: Sequence) -> int:
    """How many of the likeliest tokens its row must give."""
    beams = seq.request.beams
    return beams.width if beams is not None else seq.request.sampling.logprobs or 0


def token_logprob(sampled: Sampled, row: int, width: int) -> TokenLogprob:
    """The sampled token's log-probability, with `width` alternatives."""
    return TokenLogprob(int(sampled.ids[row]), float(sampled.logprobs[row]), _top(sampled, row, width))


def score_rows(executor: Executor, chunks: Seq[Chunk], logits: Logits) -> list[TokenLogprob]:
    """The log-probability of each next prompt token. logits: in the order of the score ranges.
    Raises EngineError where a row has none."""
    ids = np.concatenate([c.seq.ids[c.score.start + 1 : c.score.stop + 1] for c in chunks])
    widths = [c.seq.request.sampling.prompt_logprobs or 0 for c in chunks for _ in c.score]
    logprobs = executor.logprobs(logits, ids)
    if np.isnan(logprobs).any():
        raise EngineError("a row of logits has no log-probabilities", where="logits", todo="Report it")
    top = executor.sample(logits, SampleArgs.greedy(len(ids), max(widths))) if max(widths) else None
    return [
        TokenLogprob(int(ids[row]), float(logprobs[row]), _top(top, row, width) if top and width else ())
        for row, width in enumerate(widths)
    ]


def _top(sampled: Sampled, row: int, width: int) -> tuple[tuple[int, float], ...]:
    ids, logprobs = sampled.top_ids[row, :width].tolist(), sampled.top_logprobs[row, :width].tolist()
    return tuple(zip(ids, logprobs, strict=True))
