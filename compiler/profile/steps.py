"""Running one step of an artifact over and over: a prefill step and a decode step after the same context."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from codegen.costs import StepShape
from compiler.errors import CompileError
from compiler.profile.timeline import Timeline
from runtime.artifact import Artifact
from runtime.cpu.executor import CpuExecutor
from runtime.limits import Limits
from runtime.step import Step

MARKS_PER_KERNEL = 12  # its own, and those of the barriers in it and after it


@dataclass(frozen=True)
class Workload:
    """Requests of `context_tokens` cached tokens and a prompt of `prompt_tokens`, which fits in one step."""

    prompt_tokens: int
    context_tokens: int
    num_requests: int

    @property
    def tokens(self) -> int:
        """Of one request, with the one that decoding adds."""
        return self.context_tokens + self.prompt_tokens + 1

    @property
    def prefill(self) -> StepShape:
        """The prompts of as many requests as a step of the engine holds."""
        together = min(self.num_requests, Limits.max_step_tokens // self.prompt_tokens)
        return StepShape((self.prompt_tokens,) * together, (self.tokens - 1,) * together, together)

    @property
    def decode(self) -> StepShape:
        """A token of each request."""
        requests = self.num_requests
        return StepShape((1,) * requests, (self.tokens,) * requests, requests)

    def check(self, max_context: int) -> None:
        """Raises CompileError where a step or the context does not hold it."""
        if self.prompt_tokens > Limits.max_step_tokens:
            raise CompileError(
                f"a step has at most {Limits.max_step_tokens} tokens",
                where=f"--prompt-tokens {self.prompt_tokens}",
                todo="Give those before them as --context-tokens",
            )
        if self.tokens > max_context:
            raise CompileError(
                f"with the prompt and a new token they are {self.tokens}; the context is {max_context}",
                where=f"--context-tokens {self.context_tokens}",
                todo="Use fewer, or fewer --prompt-tokens",
            )


class Runner:
    """An executor whose cache holds the workload's tokens. Close it, or use it as a context manager."""

    def __init__(
        self, artifact: Artifact, workload: Workload, num_kernels: int, threads: int, isa: str | None
    ) -> None:
        model, groups = artifact.manifest.model, artifact.manifest.kv_groups
        self._block = groups[0].block if groups else 16
        self._blocks = -(-workload.tokens // self._block)  # of one request
        self._ids = np.random.default_rng(0).integers(0, model.vocab_size, workload.tokens).astype(np.int32)
        self._num_groups, self._workload = len(groups), workload
        limits = Limits(max(Limits.max_step_tokens, workload.num_requests), workload.num_requests, 0)
        num_blocks = [self._blocks * workload.num_requests] * len(groups)
        self._executor = CpuExecutor(artifact, limits, num_blocks, threads, isa)
        self._marks = np.zeros((threads, (num_kernels + 1) * MARKS_PER_KERNEL, 2), np.int64)
        self._fill()

    def run(self, shape: StepShape) -> Timeline:
        """One step, recorded."""
        self._marks[:] = 0
        self._executor.record(self._marks)
        self._executor.forward(self._step(shape))
        return Timeline.of(self._marks)

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *_: object) -> None:
        self._executor.close()

    def _fill(self) -> None:
        """Compute the first request's tokens; the others, with the same ones, get copies of its blocks."""
        tokens, most = self._workload.tokens, Limits.max_step_tokens
        for start in range(0, tokens, most):
            count = min(most, tokens - start)
            self._executor.forward(self._step(StepShape((count,), (start + count,), 0)))
        first = np.arange(self._blocks)
        for group in range(self._num_groups):
            for request in range(1, self._workload.num_requests):
                pairs = np.stack([first, first + request * self._blocks], 1).astype(np.int32)
                self._executor.copy_blocks(group, pairs)

    def _step(self, shape: StepShape) -> Step:
        """Request r has the blocks from r times a request's on, in order."""
        spans = list(zip(shape.lens, shape.counts, strict=True))
        pos = np.concatenate([np.arange(length - count, length) for length, count in spans]).astype(np.int32)
        starts = np.cumsum([0, *shape.counts]).astype(np.int32)
        owner = np.repeat(np.arange(len(spans)), shape.counts)
        table = np.arange(len(spans) * self._blocks, dtype=np.int32).reshape(len(spans), self._blocks)
        slots = (owner * self._blocks * self._block + pos).astype(np.int32)
        return Step(
            ids=self._ids[pos],
            pos=pos,
            starts=starts,
            lens=np.array(shape.lens, np.int32),
            rows=(starts[1:] - 1)[: shape.num_rows],
            slots=[slots] * self._num_groups,
            tables=[table] * self._num_groups,
        )
