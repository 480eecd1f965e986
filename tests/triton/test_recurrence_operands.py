"""Recurrences whose operands are constants, or made of weights alone, from the imported form on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Graph, Value
from ir.interpret import interpret
from ir.types import DType, Tensor
from passes.dce import Dce
from passes.page_kv import PageKv
from passes.scan_tokens import ScanTokens
from passes.select_rows import SelectRows
from tests.codegen.harness import Chunk, weight
from tests.passes import test_scan_tokens as scans
from tests.triton.harness import TritonModel

S, WIDTH, HEADS, VOCAB = symbol("S"), scans.WIDTH, scans.HEADS, 19
STATES = 3  # of a channel


def fixed_decay(b: GraphBuilder, x: Value) -> Value:
    """The same for all tokens."""
    q, k, v = (scans.split(b, x, name) for name in "qkv")
    decay = b.op("expand", weight("decay", 1, HEADS, 1, 1), shape=(1, HEADS, S, 1))
    y = b.op("recurrence", q, k, v, b.op("neg", b.op("abs", decay)))
    return b.op("reshape", y, shape=(1, S, WIDTH))


def computed_rates(b: GraphBuilder, x: Value) -> Value:
    """One head whose channels decay at rates of their own, as in Mamba."""

    def part(name: str, width: int) -> Value:
        return b.op("reshape", b.op("linear", x, weight(name, width, WIDTH)), shape=(1, 1, S, width))

    rates = b.op("neg", b.op("exp", weight("rates", 1, STATES, WIDTH)))
    step = b.op("exp", part("step", WIDTH))
    added = b.op("mul", step, part("x", WIDTH))
    y = b.op("recurrence", part("q", STATES), part("k", STATES), added, step, None, rates)
    return b.op("reshape", y, shape=(1, S, WIDTH))


def graph(mix: Callable[[GraphBuilder, Value], Value]) -> Graph:
    b = GraphBuilder("mixed", {"S": (1, 64)})
    ids = b.input("ids", Tensor(DType.I32, (1, S)))
    b.input("pos", Tensor(DType.I32, (1, S)))
    x = b.op("embed", ids, weight("embed", VOCAB, WIDTH))
    return b.graph([b.op("linear", mix(b, x), weight("head", VOCAB, WIDTH), name="logits")])


@pytest.mark.parametrize(
    "mix", [fixed_decay, computed_rates, scans.retention, scans.normalised, scans.running_sum]
)
def test_logits_are_the_imported_graphs(tmp_path: Path, mix: Callable[[GraphBuilder, Value], Value]) -> None:
    imported, rng = graph(mix), np.random.default_rng(0)
    weights = {
        w.name: rng.normal(size=w.type.shape, scale=0.3).astype(np.float32)  # type: ignore[union-attr]
        for w in imported.weights
    }
    scanned = Dce().run(ScanTokens().run(imported).graph).graph
    paged = SelectRows().run(PageKv().run(scanned).graph).graph
    assert "paged_recurrence" in {op.kind for op in paged.ops}
    model, ids = TritonModel(paged, weights, tmp_path), rng.integers(0, VOCAB, 37).tolist()
    inputs = {"ids": np.array([ids]), "pos": np.arange(37)[None]}
    want = interpret(imported, inputs, weights, np.float64).outputs[0][0]
    cache = model.cache(6)
    ends = (0, 17, 18, 37)
    chunks = [Chunk([3, 5, 1], a, ids[a:b]) for a, b in zip(ends, ends[1:], strict=False)]
    got = np.concatenate([model.step(cache, [chunk]) for chunk in chunks])
    assert np.abs(got - want).max() < 2e-5 * want.std()
