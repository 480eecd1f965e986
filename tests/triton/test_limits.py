"""What a plan may hold, and which inputs a step has: what is beyond is refused when code is generated."""

from __future__ import annotations

import pytest

from codegen import triton
from codegen.triton import context, forward
from codegen.triton.context import Context
from codegen.triton.launch import Case, Launch
from ir.dims import symbol
from ir.graph import Graph
from ir.types import DType, Tensor
from runtime.gpu import plan
from tests.codegen.harness import arg, lower, paged_builder, weight

DEVICE = triton.find_device("cuda:sm_90")


def embedding() -> Graph:
    b, _ = paged_builder()
    table = weight("table", 40, 24)
    return lower(b.graph([b.op("embed", arg(b, "ids"), table, loc="model.embed")]), "gpu")


def test_a_kernel_has_no_more_operands_than_a_launch_takes() -> None:
    ctx = Context.of(embedding(), DEVICE)
    args = {f"n{i}": ctx.size(i) for i in range(context.MAX_ARGS + 1)}
    with pytest.raises(triton.CodegenError, match="a kernel many of 511 operands; a launch takes 510"):
        ctx.launch("many", "pass", args, (1,))
    del args["n0"]
    assert len(ctx.launch("many", "pass", args, (1,)).args) == context.MAX_ARGS <= plan.MAX_ARGS - 2


def test_a_case_has_no_more_launches_than_the_runtime_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forward.MAX_LAUNCHES == plan.MAX_LAUNCHES
    for extra in (0, 1):
        launches = (Launch("k.0", (1,), ()),) * (forward.MAX_LAUNCHES + extra)
        monkeypatch.setitem(forward.KERNELS, "embed", lambda ctx, op, found=launches: [Case(found)])
        if extra == 0:
            triton.generate(embedding(), DEVICE)
    with pytest.raises(
        triton.CodegenError,
        match=r"model\.embed: no Triton kernel for embed: it takes 4097 launches; a case has 4096",
    ):
        triton.generate(embedding(), DEVICE)


def test_a_fault_of_a_printer_is_not_said_to_be_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(forward.KERNELS, "embed", lambda ctx, op: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        triton.generate(embedding(), DEVICE)


@pytest.mark.parametrize("name", ["ids7", "table", "slots", "tables0", "logits"])
def test_an_input_that_no_step_has_is_refused(name: str) -> None:
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight("table", 40, 24))
    other = b.input(name, Tensor(DType.F32, (symbol("T"), 24)))
    graph = lower(b.graph([b.op("add", x, other)]), "gpu")
    with pytest.raises(triton.CodegenError, match=f"the step has no input %{name}$"):
        triton.generate(graph, DEVICE)
