"""The kernels of an artifact: what each takes of its device, and what a step asks of it, with the bound."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from codegen import triton
from codegen.costs import Cost, Costs, StepShape
from codegen.triton import costs as triton_costs
from compiler.errors import CompileError
from compiler.profile.run import costs_of, other_version
from ir.text import parse
from runtime.artifact import Artifact
from runtime.gpu.plan import Launch, Plan
from runtime.manifest import GpuTarget

DECODE_REQUESTS, TOKENS = 16, 2048  # of the steps that are looked at unless others are asked for


@dataclass(frozen=True)
class KernelFigures:
    """One kernel doing one thing in one step.

    step: None for a kernel that none of the steps runs; the sampler's sections are steps too, not counted.
    bytes, operations, bound_us: of all its launches in the step; None where they are counted with the kernel
    that runs before it. bound: what takes that long at least: "read" (of memory), or multiplying "bf16" or
    "f32"; None where the device's rates are not known. spills: bytes per thread.
    """

    target: str
    step: str | None
    name: str
    op: str
    launches: int | None = None
    bytes: int | None = None
    operations: int | None = None
    bound: str | None = None
    bound_us: float | None = None
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None
    matrix: Mapping[str, int] | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    constants: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def json(self) -> dict[str, Any]:
        return asdict(self)


def step_shapes(
    max_context: int, requests: int | None, context: int | None, tokens: int | None
) -> dict[str, StepShape]:
    """The steps to look at: of `tokens` new tokens of each request, or one that decodes and a prefill.

    Raises CompileError where the model's context does not hold them.
    """
    if tokens is not None:
        return {"step": _shape(max_context, requests or 1, context or 0, tokens)}
    cached = min(TOKENS, max_context - 1) if context is None else context
    return {
        "decode": _shape(max_context, requests or DECODE_REQUESTS, cached, 1),
        "prefill": _shape(max_context, 1, 0, min(TOKENS, max_context)),
    }


def _shape(max_context: int, requests: int, context: int, tokens: int) -> StepShape:
    if context + tokens > max_context:
        raise CompileError(
            f"with {tokens} new tokens they are {context + tokens}; the model's context is {max_context}",
            where=f"--context {context}",
            todo=f"Use at most {max(0, max_context - tokens)}, or fewer --tokens",
        )
    return StepShape((tokens,) * requests, (context + tokens,) * requests, requests)


def kernel_figures(artifact: Artifact, target: str, shapes: Mapping[str, StepShape]) -> list[KernelFigures]:
    """In the order in which they run. Raises CompileError where another version made the artifact."""
    if target == "cpu":
        return _cpu_figures(costs_of(artifact), shapes)
    found = artifact.target(target)
    assert isinstance(found, GpuTarget)
    return _GpuKernels(artifact, found).figures(shapes)


def _cpu_figures(costs: Costs, shapes: Mapping[str, StepShape]) -> list[KernelFigures]:
    """By what they do: one library has them all. What the machine allows is `octavo profile`'s to measure."""
    found: dict[tuple[str, str], _Sum] = {}
    for step, shape in shapes.items():
        for kernel, cost in zip(costs.kernels, costs.step(shape), strict=True):
            each = found.setdefault((step, kernel.label), _Sum())
            each.launches += 1
            each.costs.append(cost)
    return [KernelFigures("cpu", step, label, label, **each.json) for (step, label), each in found.items()]


@dataclass
class _Sum:
    """Launches of one kernel, their costs, and the bounds that follow on the device."""

    device: triton.Device | None = None
    launches: int = 0
    costs: list[Cost] = field(default_factory=list[Cost])

    @property
    def json(self) -> dict[str, Any]:
        if not self.costs:
            return {"launches": self.launches}
        return {
            "launches": self.launches,
            "bytes": sum(cost.bytes for cost in self.costs),
            "operations": sum(cost.operations for cost in self.costs),
            **self._bound(),
        }

    def _bound(self) -> dict[str, Any]:
        if self.device is None:
            return {}
        bounds = [triton_costs.bound(cost, self.device) for cost in self.costs]
        longest, _ = max(bounds, key=lambda found: found[1])
        return {"bound": longest, "bound_us": round(sum(seconds for _, seconds in bounds) * 1e6, 3)}


class _GpuKernels:
    def __init__(self, artifact: Artifact, target: GpuTarget) -> None:
        self.artifact, self.target = artifact, target
        self.device = triton.find_device(target.name)
        self.plan = Plan.parse(artifact.read(target.plan), target.plan)
        listed = json.loads(artifact.read(target.kernels))["kernels"]
        self.taken = {entry["name"]: _resources(entry) for entry in listed}

    def costs(self) -> Costs:
        try:
            graph = parse(self.artifact.read(self.target.graph).decode())
            costs = triton_costs.costs_of(graph, self.device)
        except (triton.CodegenError, ValueError) as error:
            raise other_version(self.artifact) from error
        if costs.weight_order != self.target.weight_order:
            raise other_version(self.artifact)
        return costs

    def figures(self, shapes: Mapping[str, StepShape]) -> list[KernelFigures]:
        costs = self.costs()
        rows = [row for step, shape in shapes.items() for row in self._step(step, shape, costs)]
        rows += [row for name in self.plan.sections if name != "forward" for row in self._section(name)]
        run = {row.name for row in rows}
        return rows + [self._row(None, name, _stem(name)) for name in self.taken if name not in run]

    def _step(self, step: str, shape: StepShape, costs: Costs) -> Iterator[KernelFigures]:
        """What an op costs is counted with its first launch; others finish what that began."""
        found: dict[tuple[str, str], _Sum] = {}
        for launches, label, cost in self._launches(shape, costs):
            for number, launch in enumerate(launches):
                each = found.setdefault((launch.kernel, label), _Sum(self.device))
                each.launches += 1
                if number == 0 and cost is not None:
                    each.costs.append(cost)
        for (name, label), each in found.items():
            yield self._row(step, name, label, **each.json)

    def _launches(
        self, shape: StepShape, costs: Costs
    ) -> Iterator[tuple[Sequence[Launch], str, Cost | None]]:
        """Of each entry of the plan what a step launches, what it does, and its cost."""
        groups = self.artifact.manifest.kv_groups
        context = self.artifact.manifest.model.max_context
        sizes = shape.sizes | {f"M{i}": -(-context // group.block) for i, group in enumerate(groups)}
        entries, counted = self.plan.sections["forward"], costs.step(shape)
        for number, entry in enumerate(entries):
            if number < len(counted):
                yield entry.choose(sizes), costs.kernels[number].label, counted[number]
            else:  # what copies the logits
                yield entry.choose(sizes), entry.op, None

    def _section(self, section: str) -> list[KernelFigures]:
        launches = [x for entry in self.plan.sections[section] for x in entry.cases[-1].launches]
        counts = Counter(launch.kernel for launch in launches)
        return [self._row(section, name, _stem(name), launches=count) for name, count in counts.items()]

    def _row(self, step: str | None, name: str, op: str, **counted: Any) -> KernelFigures:
        return KernelFigures(self.target.name, step, name, op, **counted, **self.taken[name])


def _stem(name: str) -> str:
    return name.partition(".")[0]


def _resources(entry: Mapping[str, Any]) -> dict[str, Any]:
    names = "registers spills shared_bytes occupancy matrix num_warps num_stages".split()
    return {name: entry[name] for name in names} | {"constants": dict(entry["constants"])}
