"""Bytes and operations of a step's kernels, against counts by hand and the packed file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from codegen import cpp
from codegen.costs import LOOKUPS, Cost, Costs, StepShape
from codegen.cpp.costs import costs_of
from ir.dims import symbol
from ir.types import DType
from tests.codegen.harness import Arrays, arg, lower, paged_builder, random_weights, weight
from tests.codegen.recurrences import CASES as RECURRENCES
from tests.codegen.recurrences import graph as recurrence
from tests.codegen.test_forward import HEADS, D, G, H, I, V, graph
from tests.codegen.test_kv_formats import CASES
from tests.codegen.test_kv_formats import graph as quantized_graph

MIXED = StepShape((33, 1), (33, 18), 2)  # 33 tokens of a new prompt, one token after 17
TOKENS = 34


@pytest.fixture(scope="module")
def costs() -> Costs:
    return costs_of(lower(graph()))


def of_kind(costs: Costs, shape: StepShape, kind: str) -> list[Cost]:
    return [c for k, c in zip(costs.kernels, costs.step(shape), strict=True) if k.op.kind == kind]


def test_linears_count_rows_times_weights_and_the_head_its_rows(costs: Costs) -> None:
    qkv, out, up, down = (HEADS + 2 * G) * D * H, H * HEADS * D, 2 * I * H, H * I
    expected = [2 * TOKENS * n for n in (qkv, out, up, down)] * 2 + [2 * 2 * V * H]
    assert [c.operations for c in of_kind(costs, MIXED, "linear")] == expected


def test_attention_counts_what_the_mask_shows(costs: Costs) -> None:
    windowed, full = of_kind(costs, MIXED, "paged_attention")
    per_pair, per_key = 2 * HEADS * 2 * D, 2 * G * D * 4
    triangle = 33 * 34 // 2
    assert full.operations == per_pair * (triangle + 18)
    assert windowed.operations == per_pair * (20 * 21 // 2 + 13 * 20 + 18)
    assert full.kv_bytes == windowed.kv_bytes == per_key * (33 + 18)
    windowed, full = of_kind(costs, StepShape((1,), (40,), 1), "paged_attention")
    assert (windowed.kv_bytes, full.kv_bytes) == (20 * per_key, 40 * per_key)


def test_new_tokens_are_written_to_the_cache(costs: Costs) -> None:
    assert [c.kv_bytes for c in of_kind(costs, MIXED, "kv_write")] == [TOKENS * 2 * G * D * 4] * 2


def test_quantized_caches_count_codes_scales_and_tails() -> None:
    """Blocks of 64 tokens, 2 heads of 64: keys in 4 bits, 2 numbers a channel; values, 2 numbers a token."""
    costs, case = costs_of(lower(quantized_graph())), list(CASES).index("u4 by channel")
    per_block, exact = 2 * (2 * 64 * 64 // 2 + 2 * 64 * 4), 2 * 2 * 64 * 2
    read = of_kind(costs, StepShape((1,), (130,), 1), "paged_attention")[case]
    assert read.kv_bytes == 2 * per_block + 2 * exact
    read = of_kind(costs, StepShape((3,), (130,), 1), "paged_attention")[case]
    assert read.kv_bytes == 2 * per_block + 66 * exact
    for count, length, filled in ((1, 129, 0), (1, 128, 1), (130, 130, 2)):
        sealed = of_kind(costs, StepShape((count,), (length,), 1), "kv_seal")[0]
        assert sealed.kv_bytes == filled * (per_block + 64 * exact)


def test_recurrences_count_the_state_and_what_is_computed_on_from_it() -> None:
    """Blocks of 16 tokens, 2 heads of keys of 17, 4 of values of 67."""
    case = RECURRENCES["gated_delta"]
    costs, inputs = costs_of(lower(recurrence(case))), 4 * (2 * 17 + 4 * 67 + 4 + 4)
    state, product = 4 * 4 * 17 * 67, 2 * 4 * 17 * 67
    for count, length, replayed, states in (
        (1, 1, 0, 1),  # the state before the first token is written
        (1, 16, 15, 1),
        (1, 17, 16, 2),  # and read, of the block before
        (1, 18, 1, 1),
        (33, 33, 0, 3),
        (15, 33, 2, 2),
    ):
        (found,) = of_kind(costs, StepShape((count,), (length,), 1), "paged_recurrence")
        assert found.kv_bytes == inputs * (replayed + count) + state * states, (count, length)
        assert found.operations == product * (2 * (replayed + count) + count)
    (found,) = of_kind(costs, StepShape((1, 15), (18, 33), 2), "paged_recurrence")
    assert found.kv_bytes == inputs * (3 + 16) + state * 3


def test_activations_are_read_and_written_once(costs: Costs) -> None:
    norm = of_kind(costs, MIXED, "rms_norm")[0]
    assert (norm.activation_bytes, norm.weight_bytes) == (2 * TOKENS * H * 4, H * 4)
    qkv, out = of_kind(costs, MIXED, "linear")[:2]
    assert qkv.activation_bytes == TOKENS * 4 * (H + (HEADS + 2 * G) * D)
    assert out.activation_bytes == TOKENS * 4 * (HEADS * D + H + H)  # its residual too


@pytest.mark.parametrize("shape", [MIXED, StepShape((1,), (1,), 1)])
def test_weights_are_those_of_the_packed_file(tmp_path: Path, shape: StepShape) -> None:
    lowered = lower(graph())
    generated, costs = cpp.generate(lowered), costs_of(lowered)
    arrays = random_weights(lowered, np.random.default_rng(0))
    cpp.pack(generated, Arrays(arrays), tmp_path / "w.safetensors")
    raw = (tmp_path / "w.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    offsets = [e["data_offsets"] for name, e in header.items() if not name.startswith("filler.")]
    step = zip(costs.kernels, costs.step(shape), strict=True)
    by_kind = [(k.op.kind in LOOKUPS, c.weight_bytes) for k, c in step]
    assert sum(n for lookup, n in by_kind if not lookup) == sum(end - begin for begin, end in offsets)
    assert sum(n for lookup, n in by_kind if lookup) == sum(shape.counts) * H * 4
    assert list(costs.weight_order) == generated.weight_order


def test_quantised_linears_count_as_linears_and_tables_by_their_rows() -> None:
    b, _ = paged_builder()
    parts = weight("q", 48, 64, dtype=DType.U4), weight("s", 48, 2, dtype=DType.F16)
    x = b.op("qembed", arg(b, "ids"), *parts, group_size=32, zero=8, dtype="f32")
    found = [
        b.op("qlinear", x, *parts, group_size=32, zero=8, x_dtype=x_dtype, dtype="f32")
        for x_dtype in (None, "i8")
    ]
    costs = costs_of(lower(b.graph([b.op("concat", *found, axis=1)])))
    step = StepShape((3,), (3,), 3)
    (table,) = of_kind(costs, step, "qembed")
    panel = 2 * 16 * 2 + 64 * 16 // 2  # scales of two groups, and codes
    assert table.weight_bytes == 3 * panel // 16 and table.activation_bytes == 2 * 3 * 64 * 4
    floats, codes = of_kind(costs, step, "qlinear")
    assert floats.weight_bytes == codes.weight_bytes == 3 * panel
    assert floats.operations == codes.operations == 2 * 3 * 48 * 64
    assert (floats.dtype, codes.dtype) == ("f32", "u4")


def test_experts_count_the_rows_that_choose_them_and_the_bytes_of_those_chosen() -> None:
    """4 tokens, each of 2 of 8 experts, meet 8 (1 - (3/4)^4) of them on average."""
    b, _ = paged_builder()
    x = b.op("embed", arg(b, "ids"), weight("x", 64, 32))
    experts = b.op("take", weight("experts", 64, 2, dtype=DType.I32), arg(b, "ids"), axis=0)
    y = b.op("moe_linear", x, weight("w", 8 * 40, 32), experts, num_experts=8, gated=True)
    parts = weight("q", 8 * 24, 20, dtype=DType.U4), weight("s", 8 * 24, 1, dtype=DType.F16)
    options = {"num_experts": 8, "group_size": 32, "zero": 8, "x_dtype": "i8"}
    z = b.op("qmoe_linear", y, *parts, experts, **options)
    out = b.op("reshape", z, shape=(symbol("T"), 48))
    costs = costs_of(lower(b.graph([out])))
    (plain,), (coded,) = (of_kind(costs, StepShape((4,), (4,), 4), k) for k in ("moe_linear", "qmoe_linear"))
    assert (plain.operations, coded.operations) == (2 * 8 * 40 * 32, 2 * 8 * 24 * 20)
    assert (plain.dtype, coded.dtype) == ("f32", "u4")
    met, panel = 8 * (1 - 0.75**4), 64 + 32 * 16 // 2  # scales are filled up to 64 bytes
    assert (plain.weight_bytes, coded.weight_bytes) == (round(met * 64 * 32 * 4), round(met * 2 * panel))
    assert plain.activation_bytes == 4 * (4 * 32 + 4 * 2 + 4 * 2 * 20)  # rows, the choice, results
    (alone,) = of_kind(costs, StepShape((1,), (1,), 1), "moe_linear")
    assert alone.weight_bytes == 2 * 64 * 32 * 4
    assert [k.label for k in costs.kernels if "moe" in k.op.kind] == [
        "moe_linear 32 -> 40 gated of 8", "qmoe_linear 20 -> 24 of 8",
    ]  # fmt: skip
