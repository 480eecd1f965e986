"""One model type compiled, beside transformers: logits at every step, and errors of one that must show.

Greedy tokens prove little on a random model: random tokens are forced on it, and the logits of the prompt's
last token and of every forced one are compared.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from compiler.importers.tiny_config import CONTEXT, VOCAB_SIZE
from ir.text import parse
from runtime.step import Step
from tests.model import tiny
from tests.model.harness import Mutation, Stepper, unchanged
from tests.zoo import models

PROMPT_LENGTHS = (1, 15, 16, 17, 70)
NUM_FORCED = 6
TOLERANCE = 1e-4  # of the reference logits' standard deviation
NOTICED = 10 * TOLERANCE


class Case:
    """A compiled model and the reference of it."""

    def __init__(self, model_type: str, seed: int, directory: Path) -> None:
        """Raises what the compiler refuses."""
        checkpoint = directory / "checkpoint"
        self.model: Any = models.save(model_type, seed, checkpoint)
        self.stepper = Stepper(tiny.compiled(checkpoint, directory / "m.octavo"), CONTEXT)
        self._expected: dict[int, np.ndarray] = {}

    def logits(self, prompt_length: int, mutate: Mutation = unchanged) -> np.ndarray:
        """[1 + NUM_FORCED, V] of the prompt, one step, and of each forced token."""
        ids = _tokens(prompt_length)
        chunks = [ids[:prompt_length], *([token] for token in ids[prompt_length:])]
        return self.stepper.run(chunks, mutate)[prompt_length - 1 :]

    def worst(self, prompt_length: int, mutate: Mutation = unchanged) -> float:
        """The largest error, in standard deviations; infinite where something is not a number."""
        if prompt_length not in self._expected:
            logits = tiny.reference_logits(self.model, _tokens(prompt_length)).numpy()
            self._expected[prompt_length] = logits[prompt_length - 1 :]
        expected = self._expected[prompt_length]
        error = np.abs(self.logits(prompt_length, mutate) - expected).max() / expected.std()
        return float(np.nan_to_num(error, nan=np.inf))

    @property
    def reads_positions(self) -> bool:
        """Whether any op of the graph that runs reads the positions. Where none does (no positions, or a bias
        by distance, which attention counts itself), a wrong one cannot change anything."""
        artifact = self.stepper.artifact
        graph = parse(artifact.read(artifact.manifest.targets["cpu"].graph).decode())
        return any(value.name == "pos" for op in graph.ops for value in op.values)


def _tokens(prompt_length: int) -> list[int]:
    rng = np.random.default_rng(prompt_length)
    return [int(i) for i in rng.integers(3, VOCAB_SIZE, prompt_length + NUM_FORCED)]


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


def unnoticed(case: Case, prompt_length: int) -> list[str]:
    """The mutations that do not show as they must. Where nothing reads positions, a wrong one must change no
    bit: that it does not apply is shown, not believed."""
    found = []
    for mutate in MUTATIONS:
        if mutate is position_off_by_one and not case.reads_positions:
            same = np.array_equal(case.logits(prompt_length, mutate), case.logits(prompt_length))
            shows = same
        else:
            shows = case.worst(prompt_length, mutate) > NOTICED
        if not shows:
            found.append(mutate.__name__)
    return found
