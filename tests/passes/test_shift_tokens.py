"""shift_tokens: shifts and causal convolutions become attention to one key that computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Value, Weight
from ir.interpret import interpret
from ir.types import KV, DType, Tensor
from ir.verify import verify
from passes.dce import Dce
from passes.page_kv import PageKv
from passes.select_rows import SelectRows
from passes.shift_tokens import ShiftTokens
from tests.passes.test_page_kv import VOCAB, run_paged

S, WIDTH = symbol("S"), 6


def weight(name: str, *shape: int) -> Weight:
    return Weight(name, Tensor(DType.F32, shape))


def shifted(b: GraphBuilder, x: Value) -> Value:
    cut = b.op("slice", x, axis=1, start=0, stop=S - 1)
    return b.op("concat", weight("first", 1, 1, WIDTH), cut, axis=1)


def convolution(b: GraphBuilder, x: Value) -> Value:
    """Two after each other over zeros: the second reads the first's bias before the start."""
    zeros = b.op("full", shape=(1, WIDTH, 3), value=0.0)
    y = b.op("concat", zeros, b.op("transpose", x, perm=(0, 2, 1)), axis=2)
    y = b.op("conv1d", y, weight("deep", WIDTH, 1, 3), weight("deep.b", WIDTH), groups=WIDTH)
    y = b.op("conv1d", y, weight("wide", WIDTH, 2, 2), weight("wide.b", WIDTH), groups=3)
    return b.op("transpose", y, perm=(0, 2, 1))


def padded(b: GraphBuilder, x: Value) -> Value:
    y = b.op("conv1d", b.op("transpose", x, perm=(0, 2, 1)), weight("all", WIDTH, WIDTH, 4), padding=3)
    return b.op("transpose", b.op("slice", y, axis=2, start=0, stop=S), perm=(0, 2, 1))


def in_heads(b: GraphBuilder, x: Value) -> Value:
    """Of heads with a row of zeros before them, which a pointwise op reads on the way."""
    heads = b.op("transpose", b.op("reshape", x, shape=(1, S, 2, 3)), perm=(0, 2, 1, 3))
    long = b.op("tanh", b.op("concat", b.op("full", shape=(1, 2, 2, 3), value=0.0), heads, axis=2))
    cut = b.op("slice", long, axis=2, start=0, stop=S)
    return b.op("reshape", b.op("transpose", cut, perm=(0, 2, 1, 3)), shape=(1, S, WIDTH))


def first_rows(b: GraphBuilder, x: Value) -> Value:
    """Two rows of weights, then sums of neighbours, channels first."""
    turned = b.op("transpose", x, perm=(0, 2, 1))
    left = b.op("slice", turned, axis=2, start=0, stop=S - 1)
    both = b.op("add", left, b.op("slice", turned, axis=2, start=1, stop=S))
    long = b.op("concat", weight("rows", 1, WIDTH, 2), both, axis=2)
    return b.op("transpose", b.op("slice", long, axis=2, start=0, stop=S), perm=(0, 2, 1))


def own_first(b: GraphBuilder, x: Value) -> Value:
    """Before the first token is the first token itself."""
    first = b.op("slice", x, axis=1, start=0, stop=1)
    return b.op("concat", first, b.op("slice", x, axis=1, start=0, stop=S - 1), axis=1)


def around(b: GraphBuilder, x: Value) -> Value:
    """Rolled by one, so that the first token has the last one's."""
    cuts = [b.op("slice", x, axis=1, start=S - 1, stop=S), b.op("slice", x, axis=1, start=0, stop=S - 1)]
    return b.op("concat", *cuts, axis=1)


def overwritten(b: GraphBuilder, x: Value) -> Value:
    rest = b.op("slice", around(b, x), axis=1, start=1, stop=S)
    return b.op("concat", weight("first", 1, 1, WIDTH), rest, axis=1)


def second_first(b: GraphBuilder, x: Value) -> Value:
    cuts = [b.op("slice", x, axis=1, start=1, stop=2), b.op("slice", x, axis=1, start=0, stop=S - 1)]
    return b.op("concat", *cuts, axis=1)


def rows_after(b: GraphBuilder, x: Value) -> Value:
    cut = b.op("slice", x, axis=1, start=1, stop=S)
    return b.op("concat", cut, weight("last", 1, 1, WIDTH), axis=1)


def looks_ahead(b: GraphBuilder, x: Value) -> Value:
    y = b.op("conv1d", b.op("transpose", x, perm=(0, 2, 1)), weight("all", WIDTH, WIDTH, 3), padding=1)
    return b.op("transpose", y, perm=(0, 2, 1))


def graph(mix: Any) -> Graph:
    b = GraphBuilder("mixed", {"S": (1, 40)})
    ids = b.input("ids", Tensor(DType.I32, (1, S)))
    b.input("pos", Tensor(DType.I32, (1, S)))
    x = b.op("embed", ids, weight("embed", VOCAB, WIDTH))
    return b.graph([b.op("linear", mix(b, x), weight("head", VOCAB, WIDTH), name="logits")])


def weights(of: Graph) -> dict[str, Any]:
    rng = np.random.default_rng()
    return {w.name: rng.normal(size=w.type.shape) for w in of.weights}  # type: ignore[union-attr]


READ_BACK = (shifted, convolution, padded, in_heads, first_rows, own_first, overwritten)


@pytest.mark.parametrize("mix", READ_BACK)
@pytest.mark.parametrize("chunk", [1, 7])
def test_the_paged_form_reads_the_tokens_before(mix: Any, chunk: int) -> None:
    before = graph(mix)
    found = ShiftTokens().run(before)
    after = Dce().run(found.graph).graph
    verify(after)
    assert found.count and not any(op.kind == "conv1d" for op in after.ops)
    selected = SelectRows().run(PageKv().run(after).graph).graph
    verify(selected)
    kinds = [v.type.window or 0 for v in selected.inputs if isinstance(v.type, KV)]
    assert kinds and max(kinds) <= 4
    read = weights(before)
    requests = [np.random.default_rng().integers(0, VOCAB, n) for n in (1, 16, 33, 2)]
    for got, ids in zip(run_paged(selected, read, requests, chunk), requests, strict=True):
        whole = interpret(before, {"ids": ids[None], "pos": np.arange(len(ids))[None]}, read, np.float64)
        np.testing.assert_allclose(got, whole.outputs[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mix", [looks_ahead, around, second_first, rows_after])
def test_what_looks_ahead_stays(mix: Any) -> None:
    assert ShiftTokens().run(graph(mix)).count == 0
