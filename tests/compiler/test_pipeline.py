"""The pipeline's memory plans: each kind of device's own, whatever was planned before it."""

from __future__ import annotations

from compiler.pipeline import pipeline
from ir.text import print_graph
from passes.plan_memory import PlanMemory
from tests.codegen.harness import lower
from tests.codegen.test_forward import graph


def test_a_plan_does_not_depend_on_the_one_before_it() -> None:
    planned = lower(graph(), "cpu")
    again = PlanMemory(device="gpu").run(planned).graph
    assert print_graph(again) == print_graph(lower(graph(), "gpu")) != print_graph(planned)
    assert print_graph(PlanMemory(device="cpu").run(again).graph) == print_graph(planned)


def test_memory_is_planned_for_each_kind_of_device() -> None:
    kinds = [each.device for each in pipeline(devices=("gpu", "cpu")) if isinstance(each, PlanMemory)]
    assert kinds == ["gpu", "cpu"]
