"""Measuring an artifact: the machine and both steps in turn, over and over."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.costs import Costs
from codegen.cpp import costs as cpp_costs
from codegen.cpp.context import CodegenError
from compiler.errors import CompileError
from compiler.profile.figures import StepFigures
from compiler.profile.limits import Limits, Probe
from compiler.profile.steps import Runner, Workload
from ir.text import parse
from runtime.artifact import Artifact


@dataclass(frozen=True)
class Profile:
    limits: Limits
    steps: dict[str, StepFigures]


def costs_of(artifact: Artifact) -> Costs:
    """The costs of the artifact's kernels. Raises CompileError where another version made its code."""
    try:
        costs = cpp_costs.costs_of(parse(artifact.read(artifact.cpu.graph).decode()))
    except (CodegenError, ValueError) as error:
        raise other_version(artifact) from error
    if costs.weight_order != artifact.cpu.weight_order:
        raise other_version(artifact)
    return costs


def profile(artifact: Artifact, workload: Workload, threads: int, isa: str | None, repeats: int) -> Profile:
    """Medians over `repeats`, after one run of each step that is not counted."""
    workload.check(artifact.manifest.model.max_context)
    costs, probe = costs_of(artifact), Probe(artifact, threads, isa)
    shapes = {"prefill": workload.prefill, "decode": workload.decode}
    with Runner(artifact, workload, len(costs.kernels), threads, isa) as runner:
        rounds = [
            (probe.measure(), {name: runner.run(shape) for name, shape in shapes.items()})
            for _ in range(repeats + 1)
        ][1:]
    limits = Limits.median([measured for measured, _ in rounds])
    try:
        steps = {
            name: StepFigures.of(
                costs.kernels, costs.step(shape), shape, limits, [runs[name] for _, runs in rounds]
            )
            for name, shape in shapes.items()
        }
    except ValueError as error:
        raise other_version(artifact) from error
    return Profile(limits, steps)


def other_version(artifact: Artifact) -> CompileError:
    what = "its graph and compiled code do not fit this version of Octavo"
    return CompileError(what, where=str(artifact.root), todo="Compile it again")
