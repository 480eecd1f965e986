"""Tiny random models of sixteen architectures and a hand-written one give the reference's logits.

The mutations show that each comparison can fail: one position off in the mask, in the rotary or learned
position, or in the cache slot makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.model import tiny
from tests.model.forced import MUTATIONS, NOTICED, PROMPT_LENGTHS, TOLERANCE, Forced
from tests.model.harness import Mutation, Stepper

ARCHITECTURES = (*tiny.CONFIGS, "plain_module")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Forced]:
    """Builds and compiles an architecture once: its stepper and its reference model."""
    made: dict[str, Forced] = {}

    def case(name: str) -> Forced:
        if name not in made:
            made[name] = _compile(name, tmp_path_factory.mktemp(name))
        return made[name]

    return case


def _compile(name: str, directory: Path) -> Forced:
    if name == "plain_module":
        model: Any = tiny.build_plain()
        source: Any = model
    else:
        model, source = tiny.build(name), directory / "checkpoint"
        model.save_pretrained(source)
    return Forced(Stepper(tiny.compiled(source, directory / "m.octavo"), tiny.CONTEXT), model)


@pytest.mark.parametrize("prompt_length", PROMPT_LENGTHS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_at_every_step_are_the_references(
    cases: Callable[[str], Forced], name: str, prompt_length: int
) -> None:
    assert cases(name).worst(prompt_length) < TOLERANCE


@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_error_of_one_is_noticed(cases: Callable[[str], Forced], name: str, mutate: Mutation) -> None:
    for prompt_length in PROMPT_LENGTHS:
        if prompt_length > 1:
            assert cases(name).worst(prompt_length, mutate) > NOTICED, prompt_length
