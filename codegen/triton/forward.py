"""Prints a step's launches, in order: plan.json. docs/artifact.md describes it."""

from __future__ import annotations

import re
from typing import Any, cast

from codegen.triton.context import CodegenError, Context, refuse, shape_of
from codegen.triton.kernels import KERNELS
from codegen.triton.launch import Case
from codegen.triton.moves import contiguous
from codegen.triton.pointwise import Array, pointwise
from codegen.triton.sample import print_sections, scratch_form
from ir.dims import product
from ir.types import KV, Tensor
from passes.group_pointwise import groupable
from passes.memory.schedule import Kernel
from passes.memory.sizes import linear_form

STEP_INPUT = re.compile(r"ids|pos|lens|starts|rows|(slots|table)\d+")
MAX_LAUNCHES = 4096  # of a case, as the runtime reads it


def print_forward(ctx: Context) -> dict[str, Any]:
    """The plan. Raises CodegenError where an op has no kernel."""
    graph = ctx.graph
    _check_inputs(ctx)
    if not isinstance(graph.outputs[0].type, Tensor):
        raise CodegenError(f"graph @{graph.name}: the first output must be the logits")
    return {
        "buffers": [dict(linear_form(dim)) for dim in graph.arena],
        "sections": {"forward": _entries(ctx)} | print_sections(ctx),
        "sample_scratch": scratch_form(ctx),
    }


def _entries(ctx: Context) -> list[dict[str, Any]]:
    return [_entry(ctx, kernel) for kernel in ctx.schedule.kernels] + _deliver(ctx)


def _entry(ctx: Context, kernel: Kernel) -> dict[str, Any]:
    op = kernel.ops[0]
    cases = print_kernel(ctx, kernel)
    kinds = "+".join(dict.fromkeys(o.kind for o in kernel.ops))
    return {"op": kinds, "loc": op.loc or "", "cases": [case.json for case in cases]}


def print_kernel(ctx: Context, kernel: Kernel) -> list[Case]:
    """Launches of one kernel of the schedule. Raises CodegenError where the target has none for it."""
    op = kernel.ops[0]
    try:
        cases = _print(ctx, kernel)
        if (most := max(len(case.launches) for case in cases)) > MAX_LAUNCHES:
            raise refuse(op, f"it takes {most} launches; a case has {MAX_LAUNCHES} at most")
        return cases
    except ValueError as error:
        found = error if isinstance(error, CodegenError) else refuse(op, str(error))
        raise CodegenError(found.reason, found.op or op, kernel.ops) from error


def _print(ctx: Context, kernel: Kernel) -> list[Case]:
    op = kernel.ops[0]
    if groupable(op, ctx.schedule.constants):
        return pointwise(ctx, kernel)
    if op.kind not in KERNELS:
        raise refuse(op, "the target has none for this kind")
    return KERNELS[op.kind](ctx, op)


def _deliver(ctx: Context) -> list[dict[str, Any]]:
    """Copies the logits to the caller where no kernel could write them there."""
    if ctx.schedule.logits is not None:
        return []
    out = ctx.graph.outputs[0]
    width = product(shape_of(out)[1:])
    cases = contiguous(ctx, out, Array(ctx.given("logits", "*fp32"), cast(int, width), (1,)))
    return [{"op": "logits", "loc": "", "cases": [case.json for case in cases]}]


def _check_inputs(ctx: Context) -> None:
    for value in ctx.graph.inputs:
        if not isinstance(value.type, KV) and STEP_INPUT.fullmatch(value.name) is None:
            raise CodegenError(f"graph @{ctx.graph.name}: the step has no input %{value.name}")
