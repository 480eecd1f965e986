"""A plan whose launches leave their memory, or a device's limits, is refused before it runs."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import ArtifactError
from runtime.gpu.bounds import Room, check_bounds, span
from runtime.gpu.device import KernelSpec
from runtime.gpu.plan import Plan, evaluate

SIGNATURE = (("x", "*u8"), ("w", "*u8"), ("out", "*u8"), ("n", "i32"), ("m", "u64"))
SPECS = [KernelSpec("k.0", "k", "k", SIGNATURE, (), 1, 0, b"")]
ROOM = Room(buffers=[0, 4096], weights=[160], arrays={"x": 64}, sizes={"T": 1024, "R": 8})
ARGS = {
    "x": {"input": "x", "offset": 64},
    "w": {"weight": 0, "offset": 160},
    "out": {"buffer": 1, "offset": ["*", "T", 4]},
    "n": {"size": ["-", "T", "R"]},
    "m": {"size": ["*", "T", 2**40]},
}


def check(grid: list[Any] | None = None, **changes: Any) -> None:
    launch = {"kernel": "k.0", "grid": grid or ["T"], "args": list((ARGS | changes).values())}
    entry = {"op": "k", "loc": "", "cases": [{"when": None, "launches": [launch]}]}
    plan = {"buffers": [{}, {}], "sections": {"forward": [entry]}}
    check_bounds(Plan.parse(json.dumps(plan).encode(), "plan.json"), SPECS, {"forward": ROOM})


def test_launches_up_to_every_limit_may_run():
    check()
    check([2**31 - 1, 2**16 - 1, ["*", ["cdiv", "T", 16], "R"]])


@pytest.mark.parametrize(
    "grid", [[2**40], [2**31], [1, 2**16], [1, 1, 2**16], [["*", "T", 2**22]], [-1], [["-", "R", 9]]]
)
def test_a_grid_that_no_device_takes_is_refused(grid):
    with pytest.raises(ArtifactError, match=r"kernel k\.0: a grid of .*Compile the model again"):
        check(grid)


@pytest.mark.parametrize(
    "change",
    [
        {"x": {"input": "x", "offset": 65}},
        {"x": {"input": "x", "offset": -1}},
        {"w": {"weight": 0, "offset": 2**40}},
        {"out": {"buffer": 0, "offset": 1}},
        {"out": {"buffer": 1, "offset": ["*", "T", 5]}},
        {"out": {"buffer": 1, "offset": ["-", "T", 1]}},
        {"n": {"size": 2**31}},
        {"n": {"size": ["*", "T", 2**22]}},
        {"m": {"size": -1}},
        {"m": {"size": ["-", "T", "R"]}},
    ],
)
def test_an_operand_outside_its_memory_or_type_is_refused(change):
    with pytest.raises(ArtifactError, match=rf"operand {list(ARGS).index(next(iter(change)))}, "):
        check(**change)


MOST = {"T": 5, "R": 3}
EXPRESSIONS = st.recursive(
    st.integers(-9, 9) | st.sampled_from(list(MOST)),
    lambda inner: (
        st.tuples(st.sampled_from(["+", "-", "*", "min", "max"]), inner, inner)
        | st.tuples(st.sampled_from(["//", "cdiv"]), inner, st.integers(1, 4))
    ),
    max_leaves=5,
)


@settings(max_examples=100)
@given(expression=EXPRESSIONS)
def test_a_span_holds_every_value(expression):
    low, high = span(expression, MOST)
    for t, r in itertools.product(range(MOST["T"] + 1), range(MOST["R"] + 1)):
        assert low <= evaluate(expression, {"T": t, "R": r}) <= high


def test_a_span_is_no_wider_than_an_expression_of_one_size():
    assert span(("cdiv", ("*", 3, "T"), 4), MOST) == (0, 4)
    assert span(("-", "T", "R"), MOST) == (-3, 5)
