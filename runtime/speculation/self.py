"""The model's own int4 weights as the drafter (QuantSpec, arXiv 2502.10424), on the target's KV blocks.

It reads the keys and values that the target computed, and writes its own at the positions that it drafts
from. The step that verifies them computes every one of these positions anew, so that none of the draft's
stays: it needs no cache of its own, and never computes a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from runtime.executor import Forward
from runtime.limits import Limits
from runtime.manifest import Manifest
from runtime.rows import RowSampler
from runtime.scheduler import Chunk
from runtime.sequence import Sequence
from runtime.speculation.confidence import Confidence
from runtime.speculation.rejecting import distribution
from runtime.step import StepBuffers


class SelfDrafter:
    """forward: of the draft, opened on the target's blocks, which its owner closes. limits: of its steps, a
    token of each request. keeps: whether the rows that drafts were drawn from, f32 [V] each, stay until the
    next drafts, which distributions() needs."""

    name = "self"
    setup_s = 0.0

    def __init__(self, forward: Forward, limits: Limits, manifest: Manifest, *, keeps: bool = False) -> None:
        groups = manifest.kv_groups
        block = groups[0].block if groups else 16
        self._forward = forward
        self._buffers = StepBuffers(limits, len(groups), manifest.model.max_context, block)
        self._sampler = RowSampler(forward, limits.max_rows, logprobs="all")
        self.confidence, self._keeps = Confidence(), keeps
        self._kept: dict[Sequence, list[np.ndarray]] = {}

    def draft(self, chunks: Seq[Chunk], wanted: Seq[int]) -> Seq[int]:
        """What it computes counts as computed until it is done."""
        self._kept = {}
        self.confidence.begin()
        going = [(Chunk(chunk.seq, 1, range(0), 1), most) for chunk, most in zip(chunks, wanted, strict=True)]
        try:
            while going:
                sure = self._step([chunk for chunk, _ in going])
                going = [
                    (chunk, most)
                    for (chunk, most), goes_on in zip(going, sure, strict=True)
                    if _drafted(chunk.seq) < most
                    and (goes_on or chunk.seq.request.sampling.draft_tokens is not None)
                ]
            return [_drafted(chunk.seq) for chunk in chunks]
        finally:
            for chunk in chunks:
                chunk.seq.computed = chunk.seq.num_tokens - 1

    def _step(self, chunks: Seq[Chunk]) -> list[bool]:
        """A token of each. Whether each is sure enough of it to go on."""
        logits = self._forward.forward(self._buffers.pack(chunks))
        seqs = [chunk.seq for chunk in chunks]
        for seq, row in zip(seqs, self._forward.download(logits) if self._keeps else (), strict=False):
            self._kept.setdefault(seq, []).append(row.copy())
        for seq in seqs:
            seq.computed += 1
        sampled = self._sampler.draw(seqs, [seq.computed for seq in seqs], logits)
        for seq, token_id in zip(seqs, sampled.ids.tolist(), strict=True):
            seq.ids[seq.computed] = token_id
        logprobs = sampled.logprobs.tolist()
        return [self.confidence.goes_on(seq, logprob) for seq, logprob in zip(seqs, logprobs, strict=True)]

    def distributions(self, chunk: Chunk) -> np.ndarray | None:
        """See DrawingDrafter."""
        rows, seq = self._kept.get(chunk.seq, [])[: chunk.drafts], chunk.seq
        if not rows:
            return None
        return np.stack([distribution(row, seq, seq.num_tokens + i) for i, row in enumerate(rows)])

    def settle(self, seq: Sequence) -> None:
        """Only what its sureness was worth: its keys and values were written over by the step."""
        self.confidence.settle(seq, seq.computed - seq.num_tokens)

    def forget(self, seq: Sequence) -> None:
        """Nothing: what is kept of it goes with the next drafts."""

    def close(self) -> None:
        """The executor closes the forward."""


def _drafted(seq: Sequence) -> int:
    """Tokens so far, each of which counts as computed."""
    return seq.computed - (seq.num_tokens - 1)
