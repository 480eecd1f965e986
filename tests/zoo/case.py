"""One model type compiled, beside transformers: errors of one must show where they apply."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from compiler.importers.tiny_config import CONTEXT, VOCAB_SIZE
from tests.model import tiny
from tests.model.forced import MUTATIONS, NOTICED, Forced, position_off_by_one, slot_off_by_one
from tests.model.harness import Stepper
from tests.zoo import models

assert (VOCAB_SIZE, CONTEXT) == (tiny.VOCAB, tiny.CONTEXT)  # tokens are drawn, and contexts set, by these


class Case(Forced):
    """A model type's tiny model with the weights of a seed."""

    def __init__(self, model_type: str, seed: int, directory: Path) -> None:
        """Raises what the compiler refuses."""
        checkpoint = directory / "checkpoint"
        model = models.save(model_type, seed, checkpoint)
        super().__init__(Stepper(tiny.compiled(checkpoint, directory / "m.octavo"), tiny.CONTEXT), model)

    def reads(self, name: str) -> bool:
        """Whether any op of the graph that runs reads an input of this name, or that and a group's number.
        Where none reads the positions (there are none, or a bias by distance, which attention counts itself)
        or the slots (there are only recurrences, which find their own), a wrong one cannot change anything.
        """
        given = re.compile(rf"{name}\d*")
        return any(given.fullmatch(value.name) for op in self.stepper.graph.ops for value in op.values)


READ = {position_off_by_one: "pos", slot_off_by_one: "slots"}  # what a mutation changes


def unnoticed(case: Case, prompt_length: int) -> list[str]:
    """The mutations that do not show as they must. Where nothing reads what is wrong, it must change no bit:
    that it does not apply is shown, not believed."""
    found = []
    for mutate in MUTATIONS:
        if mutate in READ and not case.reads(READ[mutate]):
            right = np.array_equal(case.logits(prompt_length, mutate), case.logits(prompt_length))
        else:
            right = case.worst(prompt_length, mutate) > NOTICED
        if not right:
            found.append(mutate.__name__)
    return found
