"""acceptance="rejection": what a step's rows say of drafts by the rejection rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from runtime.executor import Executor, Logits
from runtime.penalties import adjust
from runtime.sampler import probabilities
from runtime.scheduler import Chunk
from runtime.sequence import Sequence
from runtime.speculation.rejection import uniforms, verify


class Judged(NamedTuple):
    """token_ids: i32 [N], the accepted drafts and the token after them. logprobs: f32 [N]."""

    token_ids: np.ndarray
    logprobs: np.ndarray


class Rejecting:
    """Greedy requests are none of its: there the rule and equality are the same.

    drawn_from: see DrawingDrafter.distributions.
    """

    def __init__(self, executor: Executor, drawn_from: Callable[[Chunk], np.ndarray | None]) -> None:
        self._executor, self._drawn_from = executor, drawn_from

    def judges(self, chunk: Chunk) -> bool:
        return chunk.drafts > 0 and chunk.seq.request.sampling.temperature > 0

    def judge(self, chunk: Chunk, logits: Logits) -> Judged:
        """logits: of the chunk's sampled rows."""
        seq = chunk.seq
        rows = self._executor.download(logits)
        p = np.stack([distribution(row, seq, seq.num_tokens + i) for i, row in enumerate(rows)])
        drafts = seq.ids[seq.num_tokens : seq.num_tokens + chunk.drafts].tolist()
        positions = range(seq.num_tokens, seq.num_tokens + chunk.samples)
        found = verify(
            p, self._drawn_from(chunk), drafts, uniforms(seq.request.seed, seq.sample_index, positions)
        )
        token_ids = np.array([*drafts[: found.accepted], found.token], np.int32)
        return Judged(token_ids, self._executor.logprobs(logits[: len(token_ids)], token_ids))


def distribution(row: np.ndarray, seq: Sequence, position: int) -> np.ndarray:
    """What the token of a position is drawn from, f64 [V]. row: f32 [V]; the tokens before are in seq.ids."""
    s = seq.request.sampling
    if s.adjusts:
        row = adjust(row, s, seq.ids[:position], seq.prompt_tokens)
    return probabilities(row, s.temperature, s.top_k, s.top_p, s.min_p)
