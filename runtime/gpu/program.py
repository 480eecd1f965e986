"""A plan over a device's memory: its launches, bound to a step's sizes and started again and again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import ArtifactError
from runtime.gpu.device import Device, KernelSpec
from runtime.gpu.plan import Expression, Launch, Operand, Plan, Sizes, evaluate

Work = Callable[[], None]  # starts one launch

_SIZE = re.compile(r"[TRQK]|M\d+")


@dataclass(frozen=True)
class Program:
    """buffers, weights: addresses, as the plan numbers them. handles: of its kernels, by name."""

    device: Device
    plan: Plan
    handles: Mapping[str, Any]
    buffers: Sequence[int]
    weights: Sequence[int]

    @staticmethod
    def of(
        device: Device,
        plan: Plan,
        specs: Sequence[KernelSpec],
        buffers: Sequence[int],
        weights: Sequence[int],
    ) -> Program:
        """Load the kernels. Raises ArtifactError where the plan does not fit them or the memory."""
        check(plan, {spec.name: spec for spec in specs}, len(buffers), len(weights))
        names = [spec.name for spec in specs]
        handles = dict(zip(names, device.load(specs), strict=True))
        return Program(device, plan, handles, buffers, weights)

    def require(self, sections: Iterable[str]) -> None:
        """Raises ArtifactError where the plan lacks one."""
        lacks = [name for name in sections if name not in self.plan.sections]
        if lacks:
            raise ArtifactError(
                f"it has no section {lacks[0]!r}", where="plan.json", todo="Compile the model again"
            )

    def bind(self, section: str, sizes: Sizes, inputs: Mapping[str, int]) -> list[Work]:
        """A section's launches for a step's sizes. inputs: addresses by name."""
        bound: list[Work] = []
        for entry in self.plan.sections[section]:
            for launch in entry.choose(sizes):
                x, y, z = ([evaluate(size, sizes) for size in launch.grid] + [1, 1])[:3]
                if x * y * z > 0:
                    args = [self._place(arg, inputs) + evaluate(arg.value, sizes) for arg in launch.args]
                    bound.append(self.device.bind(self.handles[launch.kernel], (x, y, z), args))
        return bound

    def _place(self, arg: Operand, inputs: Mapping[str, int]) -> int:
        if arg.kind == "input":
            if arg.name not in inputs:
                raise ArtifactError(
                    f"a launch reads the array {arg.name!r}, which this section is not given",
                    where="plan.json",
                    todo="Compile the model again",
                )
            return inputs[arg.name]
        if arg.kind == "size":
            return 0
        return (self.buffers if arg.kind == "buffer" else self.weights)[arg.index]


def check(plan: Plan, specs: Mapping[str, KernelSpec], num_buffers: int, num_weights: int) -> None:
    """Raises ArtifactError where a launch names what there is not."""
    for name, entries in plan.sections.items():
        for launch in (x for entry in entries for case in entry.cases for x in case.launches):
            fault = _fault(launch, specs, {"buffer": num_buffers, "weight": num_weights})
            if fault is not None:
                raise ArtifactError(fault, where=f"plan.json, section {name}", todo="Compile the model again")
        for size in (case.size for entry in entries for case in entry.cases if case.size is not None):
            unknown = _unknown([size])
            if unknown:
                raise ArtifactError(f"there is no size {unknown!r}", where=f"plan.json, section {name}")


def _fault(launch: Launch, specs: Mapping[str, KernelSpec], counts: Mapping[str, int]) -> str | None:
    spec = specs.get(launch.kernel)
    if spec is None:
        return f"there is no kernel {launch.kernel!r}"
    if len(launch.args) != len(spec.signature):
        return f"{launch.kernel} takes {len(spec.signature)} operands, not {len(launch.args)}"
    for arg, (name, type_) in zip(launch.args, spec.signature, strict=True):
        if (arg.kind == "size") == type_.startswith("*"):
            return f"{launch.kernel}: {name} of type {type_} is given a {arg.kind}"
        if arg.index >= counts.get(arg.kind, 1):
            return f"there is no {arg.kind} {arg.index}"
    unknown = _unknown([*launch.grid, *(arg.value for arg in launch.args)])
    return f"there is no size {unknown!r}" if unknown else None


def _unknown(expressions: Iterable[Expression]) -> str | None:
    """The first name in the expressions that is not a size's."""
    for expression in expressions:
        if isinstance(expression, str) and not _SIZE.fullmatch(expression):
            return expression
        if isinstance(expression, tuple):
            found = _unknown(expression[1:])
            if found:
                return found
    return None
