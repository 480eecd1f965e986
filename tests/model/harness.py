"""Runs an artifact's compiled forward step by step and hands out every logit; steps can be mutated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from runtime.artifact import Artifact
from runtime.cpu import CpuExecutor
from runtime.scheduler import Limits
from runtime.step import Step

Mutation = Callable[[Step], Step]


def unchanged(step: Step) -> Step:
    return step


class Stepper:
    """One sequence over blocks in a scrambled order, so that ignoring the block table is found out."""

    def __init__(self, engine: Path, max_tokens: int = 512) -> None:
        self.artifact = Artifact.open(engine)
        self.num_groups = len(self.artifact.manifest.kv_groups)
        self.block = self.artifact.manifest.kv_groups[0].block
        self.max_tokens = max_tokens
        self.num_blocks = -(-max_tokens // self.block) + 3  # spare ones, which a mutated slot may hit

    def logits(self, ids: Sequence[int], mutate: Mutation = unchanged) -> np.ndarray:
        """Logits [S, V] of all tokens, computed in one step."""
        return self.run([list(ids)], mutate)

    def run(self, chunks: Sequence[Sequence[int]], mutate: Mutation = unchanged) -> np.ndarray:
        """Logits [S, V] of all tokens of all chunks; each chunk is a step, the first over an empty cache."""
        executor = self._open()
        try:
            computed, found = 0, []
            for chunk in chunks:
                step = self._step(chunk, computed)
                found.append(executor.forward(mutate(step)).copy())
                computed += len(chunk)
        finally:
            executor.close()
        return np.concatenate(found)

    def _open(self) -> CpuExecutor:
        """An executor with an empty cache."""
        limits = Limits(max_step_tokens=self.max_tokens, max_requests=1, score_rows=self.max_tokens)
        return CpuExecutor(self.artifact, limits, [self.num_blocks] * self.num_groups, threads=2)

    def _step(self, chunk: Sequence[int], computed: int) -> Step:
        count = len(chunk)
        pos = np.arange(computed, computed + count, dtype=np.int32)
        table = np.random.default_rng(7).permutation(self.num_blocks)[: self.num_blocks - 1].astype(np.int32)
        slots = table[pos // self.block] * self.block + pos % self.block
        return Step(
            ids=np.array(chunk, np.int32),
            pos=pos,
            starts=np.array([0, count], np.int32),
            lens=np.array([computed + count], np.int32),
            rows=np.arange(count, dtype=np.int32),
            slots=[slots.astype(np.int32)] * self.num_groups,
            tables=[table[None].copy()] * self.num_groups,
            num_sampled=0,
        )
