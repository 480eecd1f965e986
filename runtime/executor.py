"""What runs a step: the interface between the engine and one target's compiled code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from runtime.kv.moves import Mover
from runtime.step import Step

Logits = np.ndarray  # of a step's rows, where the executor has them: len() and rows[...] are the caller's


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
    """Views that the next call may overwrite and close() frees: copy what is kept."""

    ids: np.ndarray  # i32 [Q]
    logprobs: np.ndarray  # f32 [Q], under the unscaled logits; undefined where not wanted
    top_ids: np.ndarray  # i32 [Q, num_top]
    top_logprobs: np.ndarray  # f32 [Q, num_top]


class Forward(Protocol):
    """A model opened with the step's limits, on blocks that it may share; used by one thread at a time."""

    def forward(self, step: Step) -> Logits:
        """Compute the step, write its keys and values into the cache, and return its Q rows of logits.

        The next step overwrites them. Raises EngineError, as all methods do where a device fails.
        """
        ...

    def sample(self, logits: Logits, args: SampleArgs) -> Sampled:
        """One token per row, as views that the next call overwrites and close() frees.

        Raises EngineError where a row is broken (broken_rows).
        """
        ...

    def logprobs(self, logits: Logits, ids: np.ndarray) -> np.ndarray:
        """Log-probability of one given token per row: f32 [Q]; NaN where a row is broken."""
        ...

    def broken_rows(self, logits: Logits) -> list[int]:
        """The rows that hold a NaN or +infinity, or nothing but -infinity."""
        ...

    def download(self, logits: Logits) -> np.ndarray:
        """The rows themselves, f32 [Q, V]; a view that the next step may overwrite."""
        ...

    def overwrite(self, logits: Logits, rows: np.ndarray, values: np.ndarray) -> None:
        """Write other values, f32 [N, V], over the rows logits[rows]; logits are what forward returned, or
        rows of it. Raises EngineError."""
        ...

    def close(self) -> None: ...


class Executor(Forward, Mover, Protocol):
    """What runs an engine's steps, and moves its blocks."""

    target: str  # what runs the steps, as --target spells it


def broken_rows(logits: np.ndarray) -> list[int]:
    """See Executor.broken_rows. logits: f32 [Q, V]."""
    return np.flatnonzero(~np.isfinite(logits.max(axis=-1))).tolist()
