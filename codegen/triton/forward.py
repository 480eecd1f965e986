"""Prints a step's launches, in order: plan.json. docs/artifact.md describes it."""

from __future__ import annotations

from typing import Any

from codegen.triton.context import CodegenError, Context, refuse
from codegen.triton.kernels import KERNELS
from codegen.triton.launch import Case
from ir.types import KV, Tensor
from passes.group_pointwise import groupable
from passes.memory.schedule import Kernel
from passes.memory.sizes import linear_form

NAMED_INPUTS = ("ids", "pos", "lens", "starts", "rows", "slots", "table")


def print_forward(ctx: Context) -> dict[str, Any]:
    """The plan. Raises CodegenError where an op has no kernel."""
    graph = ctx.graph
    _check_inputs(ctx)
    if not isinstance(graph.outputs[0].type, Tensor):
        raise CodegenError(f"graph @{graph.name}: the first output must be the logits")
    return {
        "buffers": [dict(linear_form(dim)) for dim in graph.arena],
        "sections": {"forward": [_entry(ctx, kernel) for kernel in ctx.schedule.kernels]},
    }


def _entry(ctx: Context, kernel: Kernel) -> dict[str, Any]:
    op = kernel.ops[0]
    cases = print_kernel(ctx, kernel)
    kinds = "+".join(dict.fromkeys(o.kind for o in kernel.ops))
    return {"op": kinds, "loc": op.loc or "", "cases": [case.json for case in cases]}


def print_kernel(ctx: Context, kernel: Kernel) -> list[Case]:
    """Launches of one kernel of the schedule."""
    op = kernel.ops[0]
    if op.attr("group") is not None or groupable(op, ctx.schedule.constants):
        raise refuse(op, "TODO pointwise")
    printer = KERNELS.get(op.kind)
    if printer is None:
        raise refuse(op, "there is none")
    return printer(ctx, op)


def _check_inputs(ctx: Context) -> None:
    for value in ctx.graph.inputs:
        if not isinstance(value.type, KV) and value.name.rstrip("0123456789") not in NAMED_INPUTS:
            raise CodegenError(f"graph @{ctx.graph.name}: the step has no input %{value.name}")
