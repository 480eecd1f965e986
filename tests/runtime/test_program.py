"""A plan's launches as a device gets them: which case, over which grid, with which addresses and numbers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from runtime.errors import ArtifactError
from runtime.gpu.device import KernelSpec
from runtime.gpu.plan import Plan
from runtime.gpu.program import Given, Memory, Program
from tests.runtime.fake_device import FakeDevice

SPECS = [
    KernelSpec("k.0", "k", "k", (("x", "*u8"), ("w", "*u8"), ("out", "*u8"), ("n", "i32")), (), 1, 0, b"")
]
MEMORY = Memory(buffers=[1000, 2000], weights=[5000])
GIVEN = {"forward": Given.of(["x", "out"], ["T", "M0"])}


def launch(grid: list[Any], **changes: Any) -> dict[str, Any]:
    args = {
        "x": {"input": "x", "offset": 8},
        "w": {"weight": 0, "offset": 16},
        "out": {"buffer": 1, "offset": ["*", "T", 4]},
        "n": {"size": ["+", "M0", 1]},
    }
    return {"kernel": "k.0", "grid": grid, "args": list((args | changes).values())}


def started(entries: list[Any], sizes: dict[str, int], only: list[int] | None = None) -> list[Any]:
    """(grid, arguments) of every launch."""
    plan = {
        "buffers": [{}, {}],
        "sections": {"forward": [{"op": "k", "loc": "", "cases": c} for c in entries]},
    }
    found: list[Any] = []
    device = FakeDevice({"k": lambda grid, *args: found.append((grid, *args))})
    program = Program(device, Plan.parse(json.dumps(plan).encode(), "plan.json"), SPECS, MEMORY, GIVEN)
    program.run("forward", sizes, {"x": 100, "out": 200}, only)
    program.run("forward", sizes, {"x": 300, "out": 200}, only)
    device.synchronize()
    return found


def test_arguments_are_addresses_and_numbers():
    cases = [[{"when": None, "launches": [launch([["cdiv", "T", 4], 3])]}]]
    assert started(cases, {"T": 9, "M0": 6}) == [
        ((3, 3, 1), 108, 5016, 2036, 7),
        ((3, 3, 1), 308, 5016, 2036, 7),
    ]


def test_constant_places_are_kept_from_step_to_step():
    fixed = launch([1], x={"buffer": 0, "offset": 4}, out={"buffer": 1, "offset": 0}, n={"size": 3})
    assert (
        started([[{"when": None, "launches": [fixed]}]], {"T": 1, "M0": 1})
        == [((1, 1, 1), 1004, 5016, 2000, 3)] * 2
    )


@pytest.mark.parametrize(("tokens", "grids"), [(1, [1]), (16, [1]), (17, [2, 3]), (64, [2, 3]), (65, [])])
def test_the_first_case_that_holds_runs(tokens, grids):
    cases = [
        {"when": ["T", 16], "launches": [launch([1])]},
        {"when": [["*", "T", 2], 128], "launches": [launch([2]), launch([3])]},
        {"when": None, "launches": []},
    ]
    found = started([cases], {"T": tokens, "M0": 1})
    assert [grid[0] for grid, *_ in found] == grids * 2


def read(sections: dict[str, Any], **others: Any) -> Plan:
    raw = {"buffers": [], "sections": sections, **others}
    return Plan.parse(json.dumps(raw).encode(), "plan.json")


@pytest.mark.parametrize(("what", "args", "launches"), [("args", 512, 1), ("launches", 1, 4096)])
def test_operands_and_launches_have_a_most(what, args, launches):
    def forward(args: int, launches: int) -> dict[str, Any]:
        found = {"kernel": "k.0", "grid": [1], "args": [{"size": 1}] * args}
        case = {"when": None, "launches": [found] * launches}
        return {"forward": [{"op": "k", "loc": "", "cases": [case]}]}

    (entry,) = read(forward(args, launches)).sections["forward"]
    assert len(entry.choose({})) == launches and len(entry.choose({})[0].args) == args
    with pytest.raises(ArtifactError, match=f"'{what}' must be a list of at most"):
        read(forward(args + (what == "args"), launches + (what == "launches")))


def test_the_samplers_sections_need_their_scratch():
    assert read({"forward": []}).sample_scratch == (0, 0)
    assert read({"forward": [], "sample": []}, sample_scratch={"Q": 8}).sample_scratch == (8, 0)
    with pytest.raises(ArtifactError, match="the field 'sample_scratch' is missing"):
        read({"forward": [], "sample": []})


def test_an_empty_grid_does_not_run():
    cases = [[{"when": None, "launches": [launch([["-", "T", 4], 2]), launch([1, 1, "M0"]), launch([7])]}]]
    assert [grid for grid, *_ in started(cases, {"T": 4, "M0": 0})] == [(7, 1, 1)] * 2


def test_some_entries_run_alone():
    cases = [[{"when": None, "launches": [launch([n])]}] for n in (5, 6, 7)]
    assert [grid[0] for grid, *_ in started(cases, {"T": 1, "M0": 1}, only=[2, 0])] == [7, 5] * 2
