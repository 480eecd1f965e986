"""Logits of a compiled model beside its reference's at every step, and errors of one that must show.

Greedy tokens prove little on a random model, which may emit one token for ever: so random tokens are forced
on it, and the logits of the prompt's last token and of every forced one are compared.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from runtime.step import Step
from tests.model import tiny
from tests.model.harness import Mutation, Stepper, unchanged

PROMPT_LENGTHS = (1, 15, 16, 17, 70)
NUM_FORCED = 6
TOLERANCE = 1e-4  # of the reference logits' standard deviation
NOTICED = 10 * TOLERANCE


class Forced:
    """A compiled model and its reference, of tiny.VOCAB tokens."""

    def __init__(self, stepper: Stepper, model: Any) -> None:
        self.stepper, self.model = stepper, model
        self._expected: dict[int, np.ndarray] = {}

    def logits(self, prompt_length: int, mutate: Mutation = unchanged) -> np.ndarray:
        """[1 + NUM_FORCED, V] of the prompt, one step, and of each forced token."""
        ids = tokens(prompt_length + NUM_FORCED, prompt_length)
        chunks = [ids[:prompt_length], *([token] for token in ids[prompt_length:])]
        return self.stepper.run(chunks, mutate)[prompt_length - 1 :]

    def worst(self, prompt_length: int, mutate: Mutation = unchanged) -> float:
        """The largest error, in standard deviations; infinite where something is not a number."""
        if prompt_length not in self._expected:
            logits = tiny.reference_logits(self.model, tokens(prompt_length + NUM_FORCED, prompt_length))
            self._expected[prompt_length] = logits.numpy()[prompt_length - 1 :]
        expected = self._expected[prompt_length]
        error = np.abs(self.logits(prompt_length, mutate) - expected).max() / expected.std()
        return float(np.nan_to_num(error, nan=np.inf))


def tokens(count: int, seed: int | None = None) -> list[int]:
    """Random ones, none of them special. seed: the count unless said."""
    rng = np.random.default_rng(count if seed is None else seed)
    return [int(i) for i in rng.integers(3, tiny.VOCAB, count)]


def kl(expected: np.ndarray, found: np.ndarray) -> float:
    """Mean over tokens of KL(expected || found), of rows of logits [S, V], in float64."""
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (expected, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


def mask_off_by_one(step: Step) -> Step:
    """Queries believe that they are one position later: they see one key too many, never written."""
    return replace(step, lens=step.lens + 1)


def position_off_by_one(step: Step) -> Step:
    """Decoded tokens are rotated, or embedded, one position late; the prompt is not, so distances shift."""
    return replace(step, pos=step.pos + 1) if len(step.pos) == 1 else step


def slot_off_by_one(step: Step) -> Step:
    """Keys and values of decoded tokens go to the slot after their own, of the same block."""
    if len(step.pos) > 1:
        return step
    return replace(step, slots=[slots // 16 * 16 + (slots + 1) % 16 for slots in step.slots])


MUTATIONS = (mask_off_by_one, position_off_by_one, slot_off_by_one)
