"""The error that quantisation makes in each layer by itself: of its outputs, for the inputs that it had
before.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from ir.dims import evaluate, product
from ir.graph import Graph, Op, Value, Weight, tensor_of
from ir.interpret import WeightReader
from ir.ops import RefCall
from ir.stream import in_place, stream
from passes.linears import experts_of
from passes.quantize_weights import MATRIX_OPS, find_matrices, reads_codes


@dataclass(frozen=True)
class LayerError:
    """Of one linear or embedding. loc: its module, or the name of a stack of experts' matrices, of which a
    module has several. matrix: the name that the graph has for what it reads.

    error: root mean square of the outputs' errors over that of the outputs. format: such as "u4 g32".
    """

    loc: str
    matrix: str
    format: str
    error: float
    weights: int


class LayerErrors:
    """Give `compute` to a run of the model as it was; `found` is the graph with its matrices quantised."""

    def __init__(self, expected: Graph, found: Graph, read: WeightReader) -> None:
        self._read = read
        self._makers = found.producers()
        parts = {op.outs[0].name: self._part(op, found) for op in expected.ops}
        self._parts = {name: part for name, part in parts.items() if part is not None}
        uses = [use for found in find_matrices(expected).values() for use in found]
        self._places = {use.op.outs[0].name: use.place for use in uses}
        self._ops = {op.outs[0].name: op for op in expected.ops if op.outs[0].name in self._parts}
        self._sums: dict[str, list[float]] = {}  # squares of errors and of outputs

    def compute(self, op: Op, call: RefCall) -> Sequence[Any]:
        results = in_place(op, call)
        part = self._parts.get(op.outs[0].name)
        if part is not None:
            given = {v.name: call.args[op.args.index(v)] for v in part.inputs}
            found = stream(part, given, self._read, [op.out.name])[op.out.name]
            self._add(op.out.name, np.asarray(results[0]), found)
        return results

    def result(self) -> tuple[LayerError, ...]:
        return tuple(self._layer(self._ops[name], *sums) for name, sums in self._sums.items())

    def _part(self, op: Op, found: Graph) -> Graph | None:
        """What the quantised graph does from the op's input to its output, as a graph of its own."""
        if op.kind not in MATRIX_OPS or not isinstance(op.args[0], Value):
            return None
        now = self._makers.get(op.out.name)
        if now is None or now.kind != op.kind or not reads_codes(now.args[1], self._makers):
            return None
        inputs = [v for v in (op.args[0], experts_of(op)) if isinstance(v, Value)]
        ops = _between(now, [v.name for v in inputs], self._makers)
        return replace(found, inputs=tuple(inputs), ops=tuple(ops), outputs=(op.out,))

    def _add(self, name: str, expected: Any, found: Any) -> None:
        sums = self._sums.setdefault(name, [0.0, 0.0])
        sums[0] += float(np.square(expected - found).sum(dtype=np.float64))
        sums[1] += float(np.square(expected).sum(dtype=np.float64))

    def _layer(self, op: Op, error: float, norm: float) -> LayerError:
        matrix = cast(Value | Weight, op.args[1])
        size = int(evaluate(product(tensor_of(matrix).shape), {}))
        share = float(np.sqrt(error / norm)) if norm else 0.0
        loc = self._places[op.out.name] or op.out.name
        return LayerError(loc, matrix.name, self._format(op.out.name), share, size)

    def _format(self, name: str) -> str:
        """Of the codes that the op reads now."""
        matrix = cast(Value, self._makers[name].args[1])
        while self._makers[matrix.name].kind != "dequantize":
            codes = [a for a in self._makers[matrix.name].args if reads_codes(a, self._makers)]
            matrix = cast(Value, codes[0])
        op = self._makers[matrix.name]
        size = op.attr("group_size")
        return f"{tensor_of(op.args[0]).dtype}{f' g{size}' if size else ''}"


def _between(last: Op, given: Container[str], makers: dict[str, Op]) -> list[Op]:
    """The ops that lead to `last` from given values and from weights, in order."""
    found: dict[int, Op] = {}

    def visit(op: Op) -> None:
        for value in op.values:
            if value.name not in given and value.name in makers and id(makers[value.name]) not in found:
                visit(makers[value.name])
        found[id(op)] = op

    visit(last)
    return list(found.values())
