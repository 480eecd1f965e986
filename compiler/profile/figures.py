"""A recorded step beside its costs and the machine's limits: per kernel, per group of like ones, in all."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from codegen.costs import Cost, CostedKernel, StepShape
from codegen.cpp.spelling import key
from compiler.profile.limits import Limits, products_s
from compiler.profile.timeline import Timeline


@dataclass(frozen=True)
class KernelFigures:
    """time_s: mean over the threads, idle_s of it at barriers. bound_s: the least that the costs take."""

    number: int
    kernel: CostedKernel
    time_s: float
    idle_s: float
    cost: Cost
    bound_s: float
    bound: str  # "read", or the type of the products

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "label": self.kernel.label,
            "ops": [f"{op.kind} {key(op.outs[0])}" for op in self.kernel.kernel.ops],
            "loc": self.kernel.op.loc,
            **_measures([self]),
        }


@dataclass(frozen=True)
class StepFigures:
    shape: StepShape
    limits: Limits
    kernels: tuple[KernelFigures, ...]
    time_s: float
    timeline: Timeline  # of the run with the median time

    @staticmethod
    def of(
        kernels: Sequence[CostedKernel],
        costs: Sequence[Cost],
        shape: StepShape,
        limits: Limits,
        runs: Sequence[Timeline],
    ) -> StepFigures:
        """Medians over the runs. Raises ValueError where these are not runs of these kernels."""
        if any(s.kernel != i for run in runs for spans in run.threads for i, s in enumerate(spans)):
            raise ValueError("the marks are not of this graph's kernels")
        times, idle = (_medians([run.kernel_s()[i] for run in runs]) for i in (0, 1))
        figures = [
            KernelFigures(number, kernel, time, waited, cost, *_bound(cost, limits))
            for number, (kernel, cost, time, waited) in enumerate(
                zip(kernels, costs, times, idle, strict=True)
            )
        ]
        ordered = sorted(runs, key=lambda run: run.time_s)
        time_s = statistics.median(run.time_s for run in runs)
        return StepFigures(shape, limits, tuple(figures), time_s, ordered[len(runs) // 2])

    @property
    def bandwidth_share(self) -> float:
        """Weights once and the keys and values, at the plain read's rate, over the step's time."""
        num_bytes = sum(k.cost.weight_bytes + k.cost.kv_bytes for k in self.kernels)
        return self.limits.read_s(num_bytes) / self.time_s

    @property
    def peak_share(self) -> float:
        """The products' operations at the peak rate, over the step's time."""
        return products_s(self.limits, [k.cost for k in self.kernels]) / self.time_s

    def groups(self) -> list[tuple[str, list[KernelFigures]]]:
        """Kernels of one label together, those that take longest first."""
        found: dict[str, list[KernelFigures]] = {}
        for kernel in self.kernels:
            found.setdefault(kernel.kernel.label, []).append(kernel)
        return sorted(found.items(), key=lambda item: -sum(k.time_s for k in item[1]))

    def as_json(self) -> dict[str, Any]:
        return {
            "tokens": sum(self.shape.counts),
            "requests": len(self.shape.counts),
            "rows": self.shape.num_rows,
            "cached_tokens": self.shape.lens[0] - self.shape.counts[0],
            **_measures(self.kernels),
            "time_s": self.time_s,
            "bandwidth_share": self.bandwidth_share,
            "peak_share": self.peak_share,
            "groups": [{"label": name, "kernels": len(g), **_measures(g)} for name, g in self.groups()],
            "kernels": [kernel.as_json() for kernel in self.kernels],
        }


def _measures(kernels: Sequence[KernelFigures]) -> dict[str, Any]:
    """Sums over kernels, and their bounds over their time. bound: of the kernel that has the largest."""
    time_s, bound_s = sum(k.time_s for k in kernels), sum(k.bound_s for k in kernels)
    return {
        "time_s": time_s,
        "idle_s": sum(k.idle_s for k in kernels),
        "weight_bytes": sum(k.cost.weight_bytes for k in kernels),
        "kv_bytes": sum(k.cost.kv_bytes for k in kernels),
        "activation_bytes": sum(k.cost.activation_bytes for k in kernels),
        "operations": sum(k.cost.operations for k in kernels),
        "bound": max(kernels, key=lambda k: k.bound_s).bound,
        "bound_s": bound_s,
        "share": bound_s / time_s,
    }


def _medians(lists: Sequence[Sequence[float]]) -> list[float]:
    return [statistics.median(each) for each in zip(*lists, strict=True)]


def _bound(cost: Cost, limits: Limits) -> tuple[float, str]:
    read_s, compute_s = limits.read_s(cost.bytes), limits.compute_s(cost.operations, cost.dtype)
    return (read_s, "read") if read_s >= compute_s else (compute_s, cost.dtype)
