"""Bytes and operations of a step's kernels on a GPU, against the arrays they read and the CPU's counts."""

from __future__ import annotations

import pytest

from codegen import triton
from codegen.costs import LOOKUPS, StepShape
from codegen.cpp import costs as cpp_costs
from codegen.triton import costs as triton_costs
from tests.codegen.harness import lower
from tests.codegen.test_forward import H, graph

MIXED = StepShape((33, 1), (33, 18), 2)
DEVICE = triton.find_device("cuda:sm_90")


@pytest.mark.parametrize("shape", [MIXED, StepShape((1,), (1,), 1)])
def test_weights_are_those_that_the_target_packs(shape: StepShape) -> None:
    lowered = lower(graph(), "gpu")
    generated, costs = triton.generate(lowered, DEVICE), triton_costs.costs_of(lowered, DEVICE)
    assert list(costs.weight_order) == generated.weight_order
    step = zip(costs.kernels, costs.step(shape), strict=True)
    by_kind = [(k.op.kind in LOOKUPS, c.weight_bytes) for k, c in step]
    tables = {w.name for k in costs.kernels if k.op.kind in LOOKUPS for w in k.weights}
    others = {w.name for k in costs.kernels if k.op.kind not in LOOKUPS for w in k.weights}
    assert tables | others == set(generated.weight_order)
    read = sum(n for lookup, n in by_kind if not lookup)
    assert read == sum(w.bytes for w in generated.weights if w.name in others)
    assert sum(n for lookup, n in by_kind if lookup) == sum(shape.counts) * H * 4


def test_operations_and_cache_are_what_the_cpu_counts() -> None:
    gpu = triton_costs.costs_of(lower(graph(), "gpu"), DEVICE).step(MIXED)
    cpu = cpp_costs.costs_of(lower(graph())).step(MIXED)
    assert [(c.operations, c.kv_bytes) for c in gpu] == [(c.operations, c.kv_bytes) for c in cpu]
