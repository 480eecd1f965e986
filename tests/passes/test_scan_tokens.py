"""scan_tokens: running sums and attention without a softmax become recurrences that compute the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Scalar, Value, Weight
from ir.interpret import interpret
from ir.types import DType, Tensor
from ir.verify import verify
from passes.dce import Dce
from passes.page_kv import PageKv
from passes.scan_tokens import ScanTokens
from passes.select_rows import SelectRows
from tests.passes.test_page_kv import VOCAB, run_paged

S, WIDTH, HEADS, SIZE = symbol("S"), 24, 4, 6
Mix = Callable[[GraphBuilder, Value], Value]


def weight(name: str, *shape: int) -> Weight:
    return Weight(name, Tensor(DType.F32, shape))


def split(b: GraphBuilder, x: Value, name: str, heads: int = HEADS) -> Value:
    """[1,heads,S,SIZE]"""
    y = b.op("linear", x, weight(name, heads * SIZE, WIDTH))
    return b.op("transpose", b.op("reshape", y, shape=(1, S, heads, SIZE)), perm=(0, 2, 1, 3))


def joined(b: GraphBuilder, x: Value) -> Value:
    return b.op("reshape", b.op("transpose", x, perm=(0, 2, 1, 3)), shape=(1, S, WIDTH))


def products(b: GraphBuilder, x: Value, groups: int = HEADS) -> Value:
    q, k = split(b, x, "q"), split(b, x, "k", groups)
    if groups < HEADS:
        one = b.op("reshape", k, shape=(1, groups, 1, S, SIZE))
        many = b.op("expand", one, shape=(1, groups, HEADS // groups, S, SIZE))
        k = b.op("reshape", many, shape=(1, HEADS, S, SIZE))
    return b.op("mul", b.op("matmul", q, b.op("transpose", k, perm=(0, 1, 3, 2))), Scalar(0.25))


def distance(b: GraphBuilder) -> Value:
    """q - k, [S,S] in f32."""
    at = b.op("cast", b.op("iota", size=S), dtype="f32")
    return b.op("sub", b.op("reshape", at, shape=(S, 1)), b.op("reshape", at, shape=(1, S)))


def past(b: GraphBuilder) -> Value:
    return b.op("ge", distance(b), Scalar(0.0))


def masked(b: GraphBuilder, x: Value, factor: Any = None, groups: int = HEADS) -> Value:
    scores = products(b, x, groups)
    scores = scores if factor is None else b.op("mul", scores, factor)
    return b.op("where", past(b), scores, Scalar(0.0))


def linear_attention(b: GraphBuilder, x: Value) -> Value:
    return joined(b, b.op("matmul", masked(b, x, groups=2), split(b, x, "v")))


def normalised(b: GraphBuilder, x: Value) -> Value:
    scores = masked(b, b.op("exp", x))
    total = b.op("sum", scores, axes=(3,), keepdims=True)
    return joined(b, b.op("div", b.op("matmul", scores, split(b, x, "v")), b.op("add", total, Scalar(30.0))))


def retention(b: GraphBuilder, x: Value) -> Value:
    """0.9 to the power of a distance that is held at 0 or more, times 0 or 1."""
    far = b.op("clamp", distance(b), low=0.0)
    factor = b.op("mul", b.op("pow", Scalar(0.9), far), b.op("cast", past(b), dtype="f32"))
    return joined(b, b.op("matmul", b.op("mul", products(b, x), factor), split(b, x, "v")))


def retention_by_head(b: GraphBuilder, x: Value) -> Value:
    rates = b.op("reshape", b.op("neg", b.op("abs", weight("rates", HEADS))), shape=(HEADS, 1, 1))
    scores = masked(b, x, b.op("exp", b.op("mul", distance(b), rates)))
    return joined(b, b.op("matmul", scores, split(b, x, "v")))


def gated(b: GraphBuilder, x: Value) -> Value:
    """A decay that each token makes for each head."""
    gates = b.op("neg", b.op("exp", b.op("linear", x, weight("gates", HEADS, WIDTH))))
    rows = b.op("cumsum", b.op("transpose", gates, perm=(0, 2, 1)), axis=2)
    at_query = b.op("reshape", rows, shape=(1, HEADS, S, 1))
    exponent = b.op("sub", at_query, b.op("reshape", rows, shape=(1, HEADS, 1, S)))
    scores = masked(b, x, b.op("exp", b.op("where", past(b), exponent, Scalar(0.0))))
    return joined(b, b.op("matmul", scores, split(b, x, "v")))


def running_sum(b: GraphBuilder, x: Value) -> Value:
    return b.op("cumsum", x, axis=1)


def running_sum_within_heads(b: GraphBuilder, x: Value) -> Value:
    return joined(b, b.op("cumsum", split(b, x, "v"), axis=2))


def running_sum_of_numbers(b: GraphBuilder, x: Value) -> Value:
    """One of each head, [1,H,S]."""
    each = b.op("mean", split(b, x, "v"), axes=(3,))
    each = b.op("reshape", b.op("cumsum", each, axis=2), shape=(1, HEADS, S, 1))
    return joined(b, b.op("expand", each, shape=(1, HEADS, S, SIZE)))


def graph(mix: Mix) -> Graph:
    b = GraphBuilder("mixed", {"S": (1, 40)})
    ids = b.input("ids", Tensor(DType.I32, (1, S)))
    b.input("pos", Tensor(DType.I32, (1, S)))
    x = b.op("embed", ids, weight("embed", VOCAB, WIDTH))
    return b.graph([b.op("linear", mix(b, x), weight("head", VOCAB, WIDTH), name="logits")])


def weights(of: Graph) -> dict[str, Any]:
    rng = np.random.default_rng()
    return {w.name: rng.normal(size=w.type.shape) for w in of.weights}  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("mix", "count"),
    [
        (linear_attention, 1), (normalised, 2), (retention, 1), (retention_by_head, 1), (gated, 2),
        (running_sum, 1), (running_sum_within_heads, 1), (running_sum_of_numbers, 1),
    ],
)  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 7])
def test_the_paged_form_goes_on_from_a_state(mix: Mix, count: int, chunk: int) -> None:
    before = graph(mix)
    found = ScanTokens().run(before)
    after = Dce().run(found.graph).graph
    verify(after)
    kinds = [op.kind for op in after.ops]
    assert found.count == count
    assert kinds.count("recurrence") == (1 if mix is gated else count)  # its running sum is read no more
    assert not {"cumsum", "matmul"} & set(kinds)
    selected = SelectRows().run(PageKv().run(after).graph).graph
    verify(selected)
    read = weights(before)
    requests = [np.random.default_rng().integers(0, VOCAB, n) for n in (1, 16, 33, 2)]
    for got, ids in zip(run_paged(selected, read, requests, chunk), requests, strict=True):
        inputs = {"ids": ids[None], "pos": np.arange(len(ids))[None]}
        whole = interpret(before, inputs, read, np.float64).outputs[0][0]
        np.testing.assert_allclose(got, whole, rtol=1e-5, atol=1e-5 * np.abs(whole).max())


def looks_ahead(b: GraphBuilder, x: Value) -> Value:
    return joined(b, b.op("matmul", products(b, x), split(b, x, "v")))


def windowed(b: GraphBuilder, x: Value) -> Value:
    near = b.op("and", past(b), b.op("lt", distance(b), Scalar(4.0)))
    scores = b.op("where", near, products(b, x), Scalar(0.0))
    return joined(b, b.op("matmul", scores, split(b, x, "v")))


def by_distance(b: GraphBuilder, x: Value) -> Value:
    return joined(b, b.op("matmul", masked(b, x, distance(b)), split(b, x, "v")))


def by_position(b: GraphBuilder, x: Value) -> Value:
    at = b.op("cast", b.op("iota", size=S), dtype="f32")
    return joined(b, b.op("matmul", masked(b, x, b.op("exp", at)), split(b, x, "v")))


def squared(b: GraphBuilder, x: Value) -> Value:
    scores = masked(b, x)
    return joined(b, b.op("matmul", b.op("mul", scores, scores), split(b, x, "v")))


@pytest.mark.parametrize(
    ("mix", "reason"),
    [
        (looks_ahead, "looks ahead"), (windowed, "not for all keys"),
        (by_distance, "no decay"), (by_position, "no decay"), (squared, "no decay"),
    ],
)  # fmt: skip
def test_what_is_no_recurrence_stays_and_says_why(mix: Mix, reason: str) -> None:
    found = ScanTokens().run(graph(mix))
    assert found.count == 0
    assert len(found.misses) == 1
    assert found.misses[0].rule == "linear attention"
    assert reason in found.misses[0].reason


def test_a_sum_of_integers_is_left_to_masks() -> None:
    b = GraphBuilder("mixed", {"S": (1, 40)})
    ids = b.input("ids", Tensor(DType.I32, (1, S)))
    b.input("pos", Tensor(DType.I32, (1, S)))
    graph = b.graph([b.op("cumsum", ids, axis=1)])
    assert ScanTokens().run(graph).count == 0
