"""One sample of a request as the scheduler sees it: tokens known, tokens computed, blocks held."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from runtime.kv.blocks import Sealed
    from runtime.kv.table import Table
    from runtime.output import Output
    from runtime.request import Request


class Sequence:
    """Tokens [0, num_tokens) are known, [0, computed) are in the KV cache; the rest is wanted.

    order: (rank, request number, sample index); smaller is served first. max_tokens: known tokens never
    exceed it. score: log-probabilities of the prompt's own tokens are wanted; scored: how many are there
    already. salt: sequences of different salts share no prefix. kept: a pinned prefix, which holds its blocks
    once it is computed.
    """

    def __init__(
        self,
        order: tuple[int, int, int],
        prompt: np.ndarray,
        max_new_tokens: int,
        max_context: int,
        output: Output,
        *,
        score: bool = False,
        salt: bytes = b"",
        kept: bool = False,
    ) -> None:
        self.order, self.salt, self.kept = order, salt, kept
        self.prompt_tokens = len(prompt)
        self.max_tokens = max(len(prompt), min(len(prompt) + max_new_tokens, max_context))
        self.ids = np.empty(self.max_tokens, np.int32)
        self.ids[: len(prompt)] = prompt
        self.num_tokens = len(prompt)
        self.computed = 0
        self.score, self.scored = score, 0
        self.tables: list[Table] = []
        self.alone_in: int | None = None  # index of a block that nobody else reads, in any group
        self.chain: list[Sealed] = []
        self.coming = range(0)  # indices of the chain's blocks that it has yet to compute
        self.forks: list[Sequence] = []  # that start from this one's blocks once its prompt is computed
        self.peers = [self]  # that go on together only; one list for all of them
        self.finished = False
        self.cached_tokens: int | None = None  # skipped by a prefix hit or a fork, when it first ran
        self.output = output
        self.request: Request  # says so itself, when it is made of its sequences

    @property
    def sample_index(self) -> int:
        return self.order[2]

    @property
    def owner(self) -> tuple[int, int]:
        """The request's number and the sample's index, as the log names it."""
        return self.order[1:]

    @property
    def generates(self) -> bool:
        """Whether it has room for a token of its own."""
        return self.max_tokens > self.prompt_tokens

    @property
    def wanted(self) -> int:
        """Tokens that must be computed: all known ones; for scoring alone, those that have a next token."""
        if self.generates or self.kept:
            return self.num_tokens
        return self.prompt_tokens - 1 if self.score else 0

    @property
    def hit_limit(self) -> int:
        """Tokens that a prefix hit may skip: a prompt token that still has to be scored must be computed."""
        if not self.score or self.scored >= self.prompt_tokens - 1:
            return self.num_tokens
        return self.scored

    @property
    def prompt(self) -> np.ndarray:
        return self.ids[: self.prompt_tokens]

    def append(self, token_id: int) -> None:
        self.ids[self.num_tokens] = token_id
        self.num_tokens += 1
