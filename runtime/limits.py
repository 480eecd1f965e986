"""The largest step: what memory is planned for, and what a step is put together within."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """score_rows: rows for prompts' own log-probabilities, beside one per request. draft_rows: for drafts, of
    which a step has no more."""

    max_step_tokens: int = 512
    max_requests: int = 64
    score_rows: int = 128
    draft_rows: int = 0

    @property
    def max_rows(self) -> int:
        return self.max_requests + self.score_rows + self.draft_rows

    @property
    def drafting(self) -> Limits:
        """Of a forward that drafts: a token of each request at a time."""
        return Limits(self.max_requests, self.max_requests, 0)
