"""Prompt lookup against the slow obvious way to find what followed before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import Sampling
from runtime.speculation.lookup import LONGEST, SHORTEST, Index, LookupDrafter
from tests.examples import examples
from tests.runtime.fake import fake_engine


def obvious(tokens: list[int], most: int) -> list[int]:
    """What follows the last place before the end of the longest run that the tokens end with."""
    for length in range(LONGEST, SHORTEST - 1, -1):
        run = tokens[len(tokens) - length :]
        starts = [i for i in range(len(tokens) - length) if tokens[i : i + length] == run]
        if len(tokens) > length and starts:
            found, at = list(tokens), starts[-1] + length
            while len(found) < at + most:  # it repeats what is between there and its end
                found.append(found[len(found) - len(tokens) + at])
            return found[at : at + most]
    return []


@examples(200)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=40), cuts=st.lists(st.integers(0, 40)), most=st.integers(1, 9)
)
def test_what_is_found_is_what_followed(tokens, cuts, most):
    index = Index()
    for cut in [*sorted(cuts), len(tokens)]:
        index.extend(tokens[len(index.tokens) : cut])
        assert index.find(most) == obvious(index.tokens, most)


def test_a_longer_run_counts_more_than_a_later_one():
    index = Index()
    index.extend([1, 2, 3, 4, 5, 9, 3, 4, 6, 1, 2, 3, 4])
    assert index.find(2) == [5, 9]


class Known:
    """As much of a sequence as is looked at."""

    def __init__(self, tokens: list[int]) -> None:
        self.ids, self.num_tokens = np.array([*tokens, *[0] * 50], np.int32), len(tokens)


def draft(drafter: LookupDrafter, seq: Known, most: int) -> list[int]:
    chunks: Any = [SimpleNamespace(seq=seq)]
    (count,) = drafter.draft(chunks, [most])
    return seq.ids[seq.num_tokens :][:count].tolist()


def test_sequences_grow_and_are_forgotten():
    drafter, seq = LookupDrafter(most_tokens=12), Known([1, 2, 3, 1, 2])
    other = Known([4] * 5)
    assert draft(drafter, seq, 2) == [3, 1]
    seq.ids[5:7], seq.num_tokens = [7, 1], 7
    assert draft(drafter, seq, 2) == []
    assert draft(drafter, other, 3) == [4, 4, 4]
    late = Known([5] * 4)
    assert draft(drafter, late, 3) == []  # the others' 12 tokens are all that may be kept
    seq.ids[7], seq.num_tokens = 2, 8
    assert draft(drafter, seq, 2) == [7, 1]  # one that has an index goes on
    drafter.forget(cast(Any, seq))
    drafter.forget(cast(Any, late))
    assert draft(drafter, late, 3) == [5, 5, 5]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_text_that_repeats_is_drafted_right(temperature):
    """Where the output is a loop, which a bias makes it, every draft is right."""
    sampling = Sampling(60, temperature, seed=3, logit_bias={7: 50.0}, logprobs=1, draft_tokens=6)
    with fake_engine() as engine:
        expected = engine.submit([1, 2, 3], sampling).result(timeout_s=60)
    with fake_engine(drafter=LookupDrafter()) as engine:
        found = engine.submit([1, 2, 3], sampling).result(timeout_s=60)
        stats = engine.stats()
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert found.draft is not None and stats.accepted_tokens == stats.drafted_tokens > 40
    assert stats.steps < 20 and stats.draft_failures == 0
