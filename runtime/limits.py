"""The largest step: what memory is planned for, and what a step is put together within."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """score_rows: rows for prompts' own log-probabilities, beside one per request."""

    max_step_tokens: int = 512
    max_requests: int = 64
    score_rows: int = 128

    @property
    def max_rows(self) -> int:
        return self.max_requests + self.score_rows
