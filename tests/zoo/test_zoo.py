"""Kinds of structure that tests/model has no model of: compiled, they give transformers' logits.

`make test-zoo` does the same with every type of tests/data/zoo, and three random seeds.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

from tests.model.forced import PROMPT_LENGTHS, TOLERANCE
from tests.zoo.case import Case, unnoticed
from tests.zoo.models import SUBSET


@pytest.mark.parametrize("model_type", SUBSET)
def test_logits_are_those_of_transformers_and_an_error_of_one_shows(model_type: str, tmp_path: Path) -> None:
    case = Case(model_type, 0, tmp_path)
    errors = {length: case.worst(length) for length in PROMPT_LENGTHS}
    assert max(errors.values()) <= TOLERANCE, errors
    assert not unnoticed(case, 17)
    gc.collect()
