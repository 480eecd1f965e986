"""What tests of passes share: run a pass on text, and compare what graphs compute in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ir.dims import evaluate
from ir.graph import Graph
from ir.interpret import interpret
from ir.text import parse
from ir.text.printer import print_graph
from ir.types import DType, Tensor
from ir.verify import verify
from passes.base import Pass, Result
from passes.dce import Dce

SIZES = {"S": 5, "T": 5}


def graph_text(head: str, *lines: str, out: str = "z") -> str:
    """A graph's text from its header, which ends in `{`, its ops and the name of its output."""
    return "\n".join([head, *lines, f"return %{out}", "}"])


def read(text: str) -> Graph:
    graph = parse(text)
    verify(graph)
    return graph


def apply(step: Pass, graph: Graph | str, rtol: float = 1e-12) -> Result:
    """The pass's result without dead ops, once it is seen to verify, round-trip and compute the same."""
    before = read(graph) if isinstance(graph, str) else graph
    found = step.run(before)
    after = Dce().run(found.graph).graph
    verify(found.graph)
    verify(after)
    assert parse(print_graph(after)) == after
    assert [v.name for v in after.outputs] == [v.name for v in before.outputs]
    assert_same_numbers(before, after, rtol)
    return Result(after, found.count, found.misses)


def expect(step: Pass, before: str, after: str, rtol: float = 1e-12) -> Result:
    """The pass turns one text into the other."""
    found = apply(step, before, rtol)
    assert print_graph(found.graph) == print_graph(read(after))
    return found


def refuse(step: Pass, text: str, reason: str) -> None:
    """The pass changes nothing and says why."""
    found = apply(step, text)
    assert print_graph(found.graph) == print_graph(read(text))
    assert any(reason in str(miss) for miss in found.misses), [str(m) for m in found.misses]


def assert_same_numbers(before: Graph, after: Graph, rtol: float = 1e-12) -> None:
    inputs, weights = random_inputs(before), random_weights(before)
    expected = interpret(before, inputs, weights, np.float64)
    found = interpret(after, inputs, weights, np.float64)
    for want, got in zip(expected.outputs, found.outputs, strict=True):
        assert np.std(want) > 0 or want.size == 1  # a comparison of constants proves nothing
        np.testing.assert_allclose(got, want, rtol=rtol, atol=rtol)
    assert [v.type for v in before.outputs] == [v.type for v in after.outputs]


def random_inputs(graph: Graph) -> dict[str, Any]:
    generator = np.random.default_rng(1)
    found: dict[str, Any] = {}
    for value in graph.inputs:
        assert isinstance(value.type, Tensor)
        shape = tuple(evaluate(d, SIZES) for d in value.type.shape)
        found[value.name] = _random(generator, value.type.dtype, shape)
    return found


def random_weights(graph: Graph) -> Mapping[str, Any]:
    generator = np.random.default_rng(2)
    return {w.name: _random(generator, w.type.dtype, w.type.shape) for w in graph.weights}


def _random(generator: np.random.Generator, dtype: DType, shape: Any) -> Any:
    if dtype is DType.BOOL:
        return generator.random(shape) < 0.5
    if dtype.is_integer:
        return generator.integers(0, 4, shape).astype(dtype.numpy)
    return generator.standard_normal(shape).astype(dtype.numpy)
