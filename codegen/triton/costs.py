"""The costs of the Triton targets' kernels (codegen.costs)."""

from __future__ import annotations

from dataclasses import dataclass, field

from codegen.costs import Cost, Costs
from codegen.triton.context import Context
from codegen.triton.devices import Device
from codegen.triton.forward import print_kernel
from codegen.triton.qlinear import NATIVE_E4M3
from codegen.triton.weights import PLAIN, PackedWeight, WeightTable
from ir.graph import Graph, Value, Weight
from passes.memory.schedule import Kernel


@dataclass
class _Recording(WeightTable):
    """used: the arrays that were asked for, until it is cleared."""

    used: set[int] = field(default_factory=set[int])

    def use(self, arg: Weight | Value, layout: str = PLAIN) -> tuple[int, PackedWeight]:
        index, found = super().use(arg, layout)
        self.used.add(index)
        return index, found


def costs_of(graph: Graph, device: Device) -> Costs:
    """Of a lowered graph. Raises CodegenError where an op has no kernel."""
    ctx, weights = Context.of(graph, device), _Recording()
    ctx.weights = weights

    def reads(kernel: Kernel) -> list[PackedWeight]:
        weights.used.clear()
        print_kernel(ctx, kernel)
        return [weights.order[i] for i in sorted(weights.used)]

    found = [reads(kernel) for kernel in ctx.schedule.kernels]
    return Costs.of(ctx.schedule, found, [w.name for w in weights.order], narrow_queries=True)


def bound(cost: Cost, device: Device) -> tuple[str, float]:
    """(what bounds a kernel, the seconds that it takes at least): "read", or the type that it multiplies."""
    read_s, compute_s = (
        cost.bytes / device.read_bytes_per_s,
        cost.operations / product_rate(cost.dtype, device),
    )
    return ("read", read_s) if read_s >= compute_s else (cost.dtype, compute_s)


def product_rate(dtype: str, device: Device) -> float:
    """Operations per second: integers of 8 bits at twice bf16's rate, e4m3 where there is none as f16, f32 as
    three of tf32 at a third of tf32's.
    """
    if dtype in ("i8", "u8", "u4"):
        return 2 * device.bf16_ops_per_s
    if dtype == "f8e4m3":
        return (2 if device.arch in NATIVE_E4M3 else 1) * device.bf16_ops_per_s
    if dtype == "bf16":
        return device.bf16_ops_per_s
    return device.f32_ops_per_s / (3 if device.dot_f32 == "tf32x3" else 1)
