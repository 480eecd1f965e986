"""Parameters that make no sense are refused with their name, value and range."""

from __future__ import annotations

import math

import numpy as np
import pytest

from runtime import RequestError, Sampling

NUMBERS = ("temperature", "top_p", "min_p")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[(n, v) for n in NUMBERS for v in (math.nan, math.inf, -0.1, "1", None, True)],
        ("temperature", 10**400),
        ("temperature", 1e-40),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", 1.01),
        *[(n, v) for n in ("max_new_tokens", "top_k", "n", "logprobs") for v in (-1, 1.0, "1", True, 2**40)],
        ("n", 0),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 0.5),
        ("stop", ""),
        ("stop", ("a", "")),
        ("stop", (1,)),
        ("stop", 7),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
        ("stop_token_ids", 3),
        ("ignore_eos", 1),
        ("prompt_logprobs", -1),
        *[(n, np.array([1, 2])) for n in ("temperature", "top_p", "min_p", "top_k", "seed", "n", "stop")],
    ],
    ids=lambda value: repr(value)[:20],
)
def test_refused(name, value):
    with pytest.raises(RequestError, match=name):
        Sampling(**{name: value})


def test_accepted():
    assert Sampling(stop="x").stop == ("x",) and Sampling(stop=["x", "y"]).stop == ("x", "y")
    assert Sampling(seed=2**64 - 1, temperature=0, top_p=1, max_new_tokens=0, logprobs=0).logprobs == 0
    assert hash(Sampling(stop_token_ids=[1, 2])) == hash(Sampling(stop_token_ids=(1, 2)))


def test_numpys_numbers_become_pythons():
    made = Sampling(max_new_tokens=np.int8(127), top_p=np.float16(0.5), stop_token_ids=np.array([3, 4]))
    assert made.max_new_tokens + 1 == 128  # an int8 would wrap around
    assert type(made.max_new_tokens) is int and type(made.top_p) is float
    assert made.stop_token_ids == (3, 4)


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(RequestError) as caught:
        Sampling(stop=["x" * 10_000, ""])
    assert len(str(caught.value)) < 200
