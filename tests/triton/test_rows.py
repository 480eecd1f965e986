"""Embedding under Triton's interpreter against the reference in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ir.graph import Graph
from tests.codegen.harness import Chunk, arg, empty_states, paged_builder, reference_step, weight
from tests.triton.harness import TritonModel


def embedded() -> Graph:
    b, _ = paged_builder()
    return b.graph([b.op("embed", arg(b, "ids"), weight("table", 40, 37))])


def test_embed(tmp_path: Path) -> None:
    model = TritonModel(embedded(), None, tmp_path)
    chunks = [Chunk(list(range(64)), 0, [3, 0, 39, 7]), Chunk(list(range(64)), 0, [1])]
    expected, _ = reference_step(model.graph, model.weights, empty_states(model.graph, 1), chunks)
    np.testing.assert_allclose(model.step([], chunks), expected, rtol=1e-6)
