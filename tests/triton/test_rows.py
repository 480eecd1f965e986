"""Norms, rotary embedding, reductions and small products under Triton's interpreter, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from ir.graph import Graph
from tests.codegen import test_rows as shared
from tests.codegen.harness import paged_builder, reference_step
from tests.triton.harness import TritonModel

CASES = shared.CASES


def graph() -> tuple[Graph, dict[str, slice]]:
    b, _ = paged_builder()
    results, columns, start = [], {}, 0
    for case in CASES:
        value = case(b)
        width = shared.width_of(value)
        columns[case.__name__] = slice(start, start + width)
        start += width
        results.append(b.op("reshape", value, shape=(shared.T, width)))
    return b.graph([b.op("concat", *results, axis=1)]), columns


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TritonModel:
    return TritonModel(graph()[0], None, tmp_path_factory.mktemp("rows"))


@pytest.fixture(scope="module")
def both(model: TritonModel) -> tuple[np.ndarray, np.ndarray]:
    chunks = [shared.chunk(0, 70)]
    return model.step([], chunks), reference_step(model.graph, model.weights, [], chunks)[0]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.__name__)
def test_close_to_float64(both: tuple[np.ndarray, np.ndarray], case: shared.Case) -> None:
    got, want = (a[:, graph()[1][case.__name__]] for a in both)
    assert np.abs(got - want).max() <= (4e-6 if case is not shared.rounded else 0) * max(
        1.0, np.abs(want).max()
    )
