"""How sure a model has to be of its drafts, and what that comes to mean."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runtime.sequence import Sequence
from runtime.speculation.confidence import USUAL, Confidence
from tests.runtime.fake import fake_engine


@pytest.fixture(scope="module")
def seq() -> Sequence:
    with fake_engine() as engine:
        return engine.submit([1, 2]).sequences[0]


def drafted(confidence: Confidence, seq: Sequence, probabilities: list[float]) -> int:
    """How many drafts are made, of models as sure as that."""
    confidence.begin()
    for count, probability in enumerate(probabilities, 1):
        if not confidence.goes_on(seq, math.log(probability)):
            return count
    return len(probabilities)


def test_drafting_ends_where_all_of_it_is_hardly_right(seq: Sequence) -> None:
    confidence = Confidence()
    assert drafted(confidence, seq, [0.3] * 8) == 8  # nothing is asked
    confidence.least = 0.45
    assert drafted(confidence, seq, [0.9] * 9) == 5  # 0.9**4 * USUAL is 0.49, 0.9**5 of it 0.44
    assert drafted(confidence, seq, [0.99, 0.3, 0.99]) == 2
    assert drafted(confidence, seq, [0.3, 0.99]) == 1


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_what_was_accepted_counts_more_than_what_the_model_says(seq: Sequence, share: float) -> None:
    confidence, rng = Confidence(), np.random.default_rng(3)
    for _ in range(400):
        drafted(confidence, seq, [0.55])
        confidence.settle(seq, int(rng.random() < share))
    confidence.least = USUAL * 0.55
    assert (drafted(confidence, seq, [0.55, 0.55]) == 2) == (share > 0.55)


def test_drafts_after_a_wrong_one_say_nothing(seq: Sequence) -> None:
    confidence = Confidence()
    for _ in range(100):
        drafted(confidence, seq, [0.55, 0.97, 0.97])
        confidence.settle(seq, 0)
    confidence.least = USUAL * 0.9
    assert drafted(confidence, seq, [0.97, 0.97]) == 2  # as sure as ever
