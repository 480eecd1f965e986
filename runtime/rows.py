"""The rows of a step's logits: which parameters each sampled row has, and what each scored row says."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from runtime.completion import TokenLogprob
from runtime.errors import EngineError
from runtime.executor import Executor, Logits, SampleArgs, Sampled
from runtime.scheduler import Chunk
from runtime.sequence import Sequence

Drawn = tuple[list[Sequence], Sampled]  # sequences, and their tokens in that order


@dataclass(frozen=True, slots=True)
class Results:
    """What a step's rows say: tokens of sequences, and scores in the order of `scoring`'s ranges."""

    drawn: Seq[Drawn]
    scoring: Seq[Chunk]
    scores: Seq[TokenLogprob]


class RowSampler:
    """Samples rows. Parameters stay from step to step, as long as the rows are of the same sequences.

    max_rows: what the executor takes at once.
    """

    def __init__(self, executor: Executor, max_rows: int) -> None:
        self._executor, self._max_rows = executor, max_rows
        self._orders: list[tuple[int, int, int]] = []  # of the last rows' sequences, which may go meanwhile
        self._args = SampleArgs.greedy(0, 0)

    def sample(self, chunks: Seq[Chunk], logits: Logits) -> list[Drawn]:
        """A token for each sequence that takes one from these chunks' last rows, which logits are: the
        chunk's own, and all samples of a prompt from the same row."""
        if not any([c.seq.forks for c in chunks]):
            seqs = [c.seq for c in chunks]
            return [(seqs, self._sample(seqs, logits))]
        pairs = [(seq, row) for row, c in enumerate(chunks) for seq in c.sampled]
        return [
            self._part(pairs[at : at + self._max_rows], logits) for at in range(0, len(pairs), self._max_rows)
        ]

    def _part(self, pairs: list[tuple[Sequence, int]], logits: Logits) -> Drawn:
        """Copies: they are gone when the next part is sampled."""
        seqs = [seq for seq, _ in pairs]
        sampled = self._sample(seqs, logits[np.array([row for _, row in pairs])])
        return seqs, Sampled(
            sampled.ids.copy(), sampled.logprobs.copy(), sampled.top_ids.copy(), sampled.top_logprobs.copy()
        )

    def _sample(self, seqs: list[Sequence], logits: Logits) -> Sampled:
        orders = [seq.order for seq in seqs]
        if orders == self._orders:
            self._args.position[:] = [seq.num_tokens for seq in seqs]
        else:
            self._orders, self._args = orders, _arguments(seqs)
        return self._executor.sample(logits, self._args)


def _arguments(seqs: Seq[Sequence]) -> SampleArgs:
    samplings = [seq.request.sampling for seq in seqs]
    return SampleArgs(
        temperature=np.array([s.temperature for s in samplings], np.float32),
        top_k=np.array([s.top_k for s in samplings], np.int32),
        top_p=np.array([s.top_p for s in samplings], np.float32),
        min_p=np.array([s.min_p for s in samplings], np.float32),
        seed=np.array([seq.request.seed for seq in seqs], np.uint64),
        sample_index=np.array([seq.sample_index for seq in seqs], np.int32),
        position=np.array([seq.num_tokens for seq in seqs], np.int32),
        num_top=max(_num_top(seq) for seq in seqs),
        logprobs=any(s.logprobs is not None for s in samplings),
    )


def _num_top(seq: Sequence) -> int:
    """How many of the likeliest tokens its row must give."""
    beams = seq.request.beams
    return beams.width if beams is not None else seq.request.sampling.logprobs or 0


def token_logprob(sampled: Sampled, row: int, width: int) -> TokenLogprob:
    """The sampled token's log-probability, with `width` alternatives."""
    return TokenLogprob(int(sampled.ids[row]), float(sampled.logprobs[row]), _top(sampled, row, width))


def score_rows(executor: Executor, chunks: Seq[Chunk], logits: Logits) -> list[TokenLogprob]:
    """The log-probability of each next prompt token. logits: in the order of the score ranges."""
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
