"""A plan over a device's memory: its sections, run for a step's sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import ArtifactError
from runtime.gpu.device import Device, KernelSpec
from runtime.gpu.plan import Entry, Expression, Launch, Operand, Plan, Sizes, evaluate


@dataclass(frozen=True, slots=True)
class Given:
    """What a section is given when it runs: arrays and sizes, by name."""

    arrays: frozenset[str]
    sizes: frozenset[str]

    @staticmethod
    def of(arrays: Iterable[str], sizes: Iterable[str]) -> Given:
        return Given(frozenset(arrays), frozenset(sizes))


@dataclass(frozen=True, slots=True)
class Memory:
    """Addresses of the arena's buffers and of the weights, as the plan numbers them."""

    buffers: Sequence[int]
    weights: Sequence[int]


@dataclass(frozen=True, slots=True)
class Call:
    """A launch. fixed: its arguments, but for those that differ from step to step: (which, array, base, the
    number or the bytes into it)."""

    kernel: Any
    grid: tuple[Expression, Expression, Expression]
    fixed: list[int]
    varying: tuple[tuple[int, str | None, int, Expression], ...]


@dataclass(frozen=True, slots=True)
class Bound:
    """An entry, and the calls of each of its cases."""

    entry: Entry
    calls: tuple[tuple[Call, ...], ...]


class Program:
    """given: the sections to run. Raises ArtifactError where the plan lacks one, or does not fit the kernels,
    the memory or what is given."""

    def __init__(
        self,
        device: Device,
        plan: Plan,
        specs: Sequence[KernelSpec],
        memory: Memory,
        given: Mapping[str, Given],
    ) -> None:
        self.plan, self._launch = plan, device.launch
        by_name = {spec.name: spec for spec in specs}
        for name, what in given.items():
            _check(plan, name, by_name, memory, what)
        handles = dict(zip(by_name, device.load(list(by_name.values())), strict=True))
        self._sections = {
            name: [_bound(entry, handles, memory) for entry in plan.sections[name]] for name in given
        }

    def run(
        self, section: str, sizes: Sizes, arrays: Mapping[str, int], only: Sequence[int] | None = None
    ) -> None:
        """Start a section's launches. arrays: addresses by name. only: numbers of its entries, not all."""
        launch, entries = self._launch, self._sections[section]
        for bound in entries if only is None else [entries[number] for number in only]:
            for call in bound.calls[bound.entry.chosen(sizes)]:
                x, y, z = call.grid
                grid = evaluate(x, sizes), evaluate(y, sizes), evaluate(z, sizes)
                if 0 in grid:
                    continue
                args = call.fixed.copy()
                for index, array, base, value in call.varying:
                    start = base if array is None else arrays[array]
                    args[index] = start + evaluate(value, sizes)
                launch(call.kernel, grid, args)


def _bound(entry: Entry, handles: Mapping[str, Any], memory: Memory) -> Bound:
    calls = (tuple(_call(launch, handles, memory) for launch in case.launches) for case in entry.cases)
    return Bound(entry, tuple(calls))


def _call(launch: Launch, handles: Mapping[str, Any], memory: Memory) -> Call:
    x, y, z = (*launch.grid, 1, 1)[:3]
    bases = [_base(arg, memory) for arg in launch.args]
    fixed = [
        base + arg.value if isinstance(arg.value, int) else base
        for base, arg in zip(bases, launch.args, strict=True)
    ]
    varying = tuple(
        (index, arg.name if arg.kind == "input" else None, base, arg.value)
        for index, (base, arg) in enumerate(zip(bases, launch.args, strict=True))
        if arg.kind == "input" or not isinstance(arg.value, int)
    )
    return Call(handles[launch.kernel], (x, y, z), fixed, varying)


def _base(arg: Operand, memory: Memory) -> int:
    if arg.kind == "buffer":
        return memory.buffers[arg.index]
    return memory.weights[arg.index] if arg.kind == "weight" else 0


def _check(plan: Plan, section: str, specs: Mapping[str, KernelSpec], memory: Memory, given: Given) -> None:
    def refuse(fault: str) -> ArtifactError:
        return ArtifactError(fault, where=f"plan.json, section {section}", todo="Compile the model again")

    if section not in plan.sections:
        raise refuse("it is missing")
    for case in (case for entry in plan.sections[section] for case in entry.cases):
        sizes = [] if case.size is None else [case.size]
        for launch in case.launches:
            fault = _fault(launch, specs, memory, given)
            if fault is not None:
                raise refuse(fault)
            sizes += [*launch.grid, *(arg.value for arg in launch.args)]
        unknown = sorted(set(_names(sizes)) - given.sizes)
        if unknown:
            raise refuse(f"there is no size {unknown[0]!r}")


def _fault(launch: Launch, specs: Mapping[str, KernelSpec], memory: Memory, given: Given) -> str | None:
    spec = specs.get(launch.kernel)
    if spec is None:
        return f"there is no kernel {launch.kernel!r}"
    if len(launch.args) != len(spec.signature):
        return f"{launch.kernel} takes {len(spec.signature)} operands, not {len(launch.args)}"
    counts = {"buffer": len(memory.buffers), "weight": len(memory.weights)}
    for arg, (name, type_) in zip(launch.args, spec.signature, strict=True):
        if (arg.kind == "size") == type_.startswith("*"):
            return f"{launch.kernel}: {name} of type {type_} is given a {arg.kind}"
        if arg.kind == "input" and arg.name not in given.arrays:
            return f"there is no array {arg.name!r}"
        if arg.index >= counts.get(arg.kind, 1):
            return f"there is no {arg.kind} {arg.index}"
    return None


def _names(expressions: Iterable[Expression]) -> Iterable[str]:
    """The names of sizes in expressions."""
    for expression in expressions:
        if isinstance(expression, str):
            yield expression
        elif isinstance(expression, tuple):
            yield from _names(expression[1:])
