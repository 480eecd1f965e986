"""What an engine has done since it was loaded, beside what its log counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    steps: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    finished_samples: int = 0
    failed_requests: int = 0
    step_s: float = 0.0  # spent in steps, and of that
    forward_s: float = 0.0  # in the executor's forward
