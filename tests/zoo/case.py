"""One model type compiled, beside transformers: errors of one must show where they apply."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compiler.importers.tiny_config import CONTEXT, VOCAB_SIZE
from tests.model import tiny
from tests.model.forced import MUTATIONS, NOTICED, Forced, position_off_by_one
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

    @property
    def reads_positions(self) -> bool:
        """Whether any op of the graph that runs reads the positions. Where none does (no positions, or a bias
        by distance, which attention counts itself), a wrong one cannot change anything."""
        return any(value.name == "pos" for op in self.stepper.graph.ops for value in op.values)


def unnoticed(case: Case, prompt_length: int) -> list[str]:
    """The mutations that do not show as they must. Where nothing reads positions, a wrong one must change no
    bit: that it does not apply is shown, not believed."""
    found = []
    for mutate in MUTATIONS:
        if mutate is position_off_by_one and not case.reads_positions:
            right = np.array_equal(case.logits(prompt_length, mutate), case.logits(prompt_length))
        else:
            right = case.worst(prompt_length, mutate) > NOTICED
        if not right:
            found.append(mutate.__name__)
    return found
