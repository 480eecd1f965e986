"""The costs of the C++ target's kernels (codegen.costs)."""

from __future__ import annotations

from codegen.costs import Costs
from codegen.cpp.context import Context
from codegen.cpp.forward import print_kernel
from codegen.cpp.weights import PackedWeight
from ir.graph import Graph
from passes.memory.schedule import Kernel


def costs_of(graph: Graph) -> Costs:
    """Of a lowered graph. Raises CodegenError where an op has no kernel."""
    ctx = Context.of(graph)

    def reads(kernel: Kernel) -> list[PackedWeight]:
        ctx.used.clear()
        print_kernel(ctx, kernel)
        return [ctx.weights.order[i] for i in sorted(ctx.used)]

    found = [reads(kernel) for kernel in ctx.schedule.kernels]
    return Costs.of(ctx.schedule, found, [w.name for w in ctx.weights.order])
