"""What the CPU target's steps take of memory beside weights and blocks."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.cpu.plan import Plan
from runtime.limits import Limits
from runtime.manifest import KVGroup, Model
from runtime.memory.plan import Workspace
from runtime.sampling import MAX_LOGPROBS

STRIP_TOKENS, STRIP_BYTES = 1024, 64 + 8 + 16 + 16  # of a row of logits in octavo_sample, and what it notes
KEPT_BYTES = 24  # per token of the vocabulary, while a thread collects those that top-k and top-p keep


def count_workspace(
    plan: Plan, limits: Limits, model: Model, groups: Sequence[KVGroup], threads: int
) -> Workspace:
    """For steps up to the limits."""
    return Workspace(
        arena=plan.arena_bytes(limits),
        logits=limits.max_rows * model.vocab_size * 4,
        sampler=sampler_bytes(limits, model, threads),
        inputs=input_bytes(limits, model, groups),
    )


def sampler_bytes(limits: Limits, model: Model, threads: int) -> int:
    """The most that a call of octavo_sample takes: parameters and results of its rows, notes on their strips,
    and in each thread the tokens that are kept of a row."""
    rows, vocab = limits.max_rows, model.vocab_size
    strips = -(-vocab // STRIP_TOKENS)
    given, found = 8 + 6 * 4, 4 + 4 + min(MAX_LOGPROBS, vocab) * (4 + 4)
    return rows * (given + found + strips * STRIP_BYTES) + threads * (vocab * KEPT_BYTES + strips * 64)


def input_bytes(limits: Limits, model: Model, groups: Sequence[KVGroup]) -> int:
    """Of the arrays that steps are packed into (runtime.step), i32."""
    tokens, requests = limits.max_step_tokens, limits.max_requests
    widths = [-(-model.max_context // group.block) for group in groups]
    numbers = 2 * tokens + 2 * requests + 1 + limits.max_rows + max(tokens, requests) + 1
    return 4 * (numbers + sum(tokens + requests * width for width in widths))
