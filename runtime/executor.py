"""What runs a step: the interface between the engine and one target's compiled code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.step import Step


@dataclass(frozen=True, slots=True)
class SampleArgs:
    """Parameters of Q rows, and how many of the likeliest tokens to report for each.

    logprobs: whether log-probabilities are wanted at all.
    """

    temperature: np.ndarray  # f32 [Q]
    top_k: np.ndarray  # i32 [Q], 0: all
    top_p: np.ndarray  # f32 [Q]
    min_p: np.ndarray  # f32 [Q]
    seed: np.ndarray  # u64 [Q]
    sample_index: np.ndarray  # i32 [Q]
    position: np.ndarray  # i32 [Q]: the one that the sampled token takes
    num_top: int
    logprobs: bool = True

    @staticmethod
    def greedy(num_rows: int, num_top: int) -> SampleArgs:
        zeros, ones = np.zeros(num_rows, np.int32), np.ones(num_rows, np.float32)
        none = np.zeros(num_rows, np.float32)
        return SampleArgs(none, zeros, ones, none, np.zeros(num_rows, np.uint64), zeros, zeros, num_top)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Views that the next call may overwrite."""

    ids: np.ndarray  # i32 [Q]
    logprobs: np.ndarray  # f32 [Q], under the unscaled logits; undefined where not wanted
    top_ids: np.ndarray  # i32 [Q, num_top]
    top_logprobs: np.ndarray  # f32 [Q, num_top]


class Executor(Protocol):
    """Opened with the step's limits and the blocks of each group; used by one thread at a time."""

    def forward(self, step: Step) -> np.ndarray:
        """Compute the step, write its keys and values into the cache, and return its logits, f32 [Q, V].

        They are a view that the next step overwrites. Raises EngineError.
        """
        ...

    def sample(self, logits: np.ndarray, args: SampleArgs) -> Sampled: ...

    def logprobs(self, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Log-probability of one given token per row: f32 [Q]."""
        ...

    def copy_blocks(self, group: int, pairs: np.ndarray) -> None:
        """Copy whole blocks within one group; pairs: i32 [n, 2], from and to."""
        ...

    def close(self) -> None: ...
