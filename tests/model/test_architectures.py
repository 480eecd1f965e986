"""Tiny random models of sixteen architectures and a hand-written one give the reference's logits.

Greedy tokens prove little on a random model, which may emit one token for ever; so random tokens are forced
on it and the logits of every step are compared. The mutations show that each comparison can fail: one
position off in the mask, in the rotary or learned position, or in the cache slot makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.step import Step
from tests.model import tiny
from tests.model.harness import Mutation, Stepper

PROMPT_LENGTHS = (1, 15, 16, 17, 70)
NUM_FORCED = 6
TOLERANCE = 1e-4  # of the reference logits' standard deviation
ARCHITECTURES = (*tiny.CONFIGS, "plain_module")

Case = tuple[Stepper, Any]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Builds and compiles an architecture once: its stepper and its reference model."""
    made: dict[str, Case] = {}

    def case(name: str) -> Case:
        if name not in made:
            made[name] = _compile(name, tmp_path_factory.mktemp(name))
        return made[name]

    return case


def _compile(name: str, directory: Path) -> Case:
    if name == "plain_module":
        model: Any = tiny.build_plain()
        source: Any = model
    else:
        model, source = tiny.build(name), directory / "checkpoint"
        model.save_pretrained(source)
    return Stepper(tiny.compiled(source, directory / "m.octavo"), tiny.CONTEXT), model


def worst(case: Case, prompt_length: int, mutate: Mutation | None = None) -> float:
    """The largest error over the prompt's last token and all forced tokens, in standard deviations."""
    stepper, model = case
    rng = np.random.default_rng(prompt_length)
    ids = [int(i) for i in rng.integers(3, tiny.VOCAB, prompt_length + NUM_FORCED)]
    expected = tiny.reference_logits(model, ids).numpy()[prompt_length - 1 :]
    chunks = [ids[:prompt_length], *([token] for token in ids[prompt_length:])]
    found = stepper.run(chunks, mutate or (lambda step: step))[prompt_length - 1 :]
    assert np.isfinite(found).all() or mutate
    return float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max() / expected.std())


@pytest.mark.parametrize("prompt_length", PROMPT_LENGTHS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_at_every_step_are_the_references(
    cases: Callable[[str], Case], name: str, prompt_length: int
) -> None:
    assert worst(cases(name), prompt_length) < TOLERANCE


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


@pytest.mark.parametrize("mutate", [mask_off_by_one, position_off_by_one, slot_off_by_one])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_error_of_one_is_noticed(cases: Callable[[str], Case], name: str, mutate: Mutation) -> None:
    for prompt_length in PROMPT_LENGTHS:
        if prompt_length > 1:
            assert worst(cases(name), prompt_length, mutate) > 10 * TOLERANCE, prompt_length
