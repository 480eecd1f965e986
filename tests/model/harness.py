"""Runs an artifact's compiled forward step by step and hands out every logit; steps can be mutated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from compiler.trial import open_executor
from ir.graph import Graph
from ir.text import parse
from runtime.artifact import Artifact
from runtime.executor import Executor
from runtime.limits import Limits
from runtime.step import Step

Mutation = Callable[[Step], Step]


def unchanged(step: Step) -> Step:
    return step


class Stepper:
    """One sequence over blocks in a scrambled order, so that ignoring the block table is found out."""

    def __init__(self, engine: Path, max_tokens: int = 512, target: str = "cpu") -> None:
        self.artifact, self.target = Artifact.open(engine), target
        self.num_groups = len(self.artifact.manifest.kv_groups)
        self.block = self.artifact.manifest.kv_groups[0].block
        self.max_tokens = max_tokens
        self.num_blocks = -(-max_tokens // self.block) + 3  # spare ones, which a mutated slot may hit

    @property
    def graph(self) -> Graph:
        """The one that runs."""
        return parse(self.artifact.read(self.artifact.manifest.targets[self.target].graph).decode())

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
                found.append(executor.download(executor.forward(mutate(step))).copy())
                computed += len(chunk)
        finally:
            executor.close()
        return np.concatenate(found)

    def batch(
        self, prompts: Sequence[Sequence[int]], steps: Sequence[Sequence[tuple[int, int, int]]]
    ) -> list[np.ndarray]:
        """Logits [S, V] of each prompt; a step is its chunks (prompt, first, last) packed together."""
        width = -(-max(map(len, prompts)) // self.block)
        blocks = np.random.default_rng(8).permutation(width * len(prompts)).astype(np.int32)
        tables = blocks.reshape(len(prompts), width)
        found: list[list[np.ndarray]] = [[] for _ in prompts]
        total = sum(map(len, prompts))
        limits = Limits(max_step_tokens=total, max_requests=len(prompts), score_rows=total)
        executor = open_executor(self.artifact, self.target, limits, [len(blocks)] * self.num_groups)
        try:
            for chunks in steps:
                logits = executor.download(executor.forward(self._packed(prompts, chunks, tables)))
                ends = np.cumsum([hi - lo for _, lo, hi in chunks])
                for (prompt, _, _), part in zip(chunks, np.split(logits, ends[:-1]), strict=True):
                    found[prompt].append(part.copy())
        finally:
            executor.close()
        return [np.concatenate(parts) for parts in found]

    def _packed(
        self,
        prompts: Sequence[Sequence[int]],
        chunks: Sequence[tuple[int, int, int]],
        tables: np.ndarray,  # [prompts, blocks]
    ) -> Step:
        pos = np.concatenate([np.arange(lo, hi) for _, lo, hi in chunks]).astype(np.int32)
        owner = np.concatenate([np.full(hi - lo, prompt) for prompt, lo, hi in chunks])
        slots = tables[owner, pos // self.block] * self.block + pos % self.block
        return Step(
            ids=np.concatenate([prompts[p][lo:hi] for p, lo, hi in chunks]).astype(np.int32),
            pos=pos,
            starts=np.cumsum([0, *(hi - lo for _, lo, hi in chunks)]).astype(np.int32),
            lens=np.array([hi for _, _, hi in chunks], np.int32),
            rows=np.arange(len(pos), dtype=np.int32),
            slots=[slots.astype(np.int32)] * self.num_groups,
            tables=[np.ascontiguousarray(tables[[p for p, _, _ in chunks]])] * self.num_groups,
        )

    def _open(self) -> Executor:
        """An executor with an empty cache."""
        limits = Limits(max_step_tokens=self.max_tokens, max_requests=1, score_rows=self.max_tokens)
        return open_executor(self.artifact, self.target, limits, [self.num_blocks] * self.num_groups)

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
        )
