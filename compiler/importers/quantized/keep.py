"""A graph on quantised matrices: `dequantize` of codes in place of the weights that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from compiler.importers.quantized.matrix import OFFSET, ZERO, Matrix
from compiler.weights import Array, ArraySource
from ir.build import GraphBuilder
from ir.graph import Arg, Graph, Op, Value, Weight, tensor_of
from ir.types import DType, Tensor


def keep_grids(graph: Graph, matrices: Mapping[str, Matrix]) -> tuple[Graph, ArraySource]:
    """The graph on the matrices' parts, `@NAME.q`, `@NAME.scale` and so on, and what it reads beside them.

    matrices: by weights' names; of a stack [E,N,K] all rows as one. Where columns are in the order of their
    groups (act-order), a linear's input is put into that order too; for any other op the matrix is put back.
    """
    return _Keep(graph, matrices).run()


class _Keep:
    """Builds the graph anew."""

    def __init__(self, graph: Graph, matrices: Mapping[str, Matrix]) -> None:
        self.graph, self.matrices = graph, matrices
        self.build = GraphBuilder(graph.name, graph.dims, graph.inputs)
        self.build.reserve(out.name for op in graph.ops for out in op.outs)
        self.made: dict[str, Value] = {}
        self.orders: dict[bytes, Weight] = {}
        self.arrays: dict[str, Array] = {}
        self.moved: dict[tuple[Arg, Weight], Value] = {}

    def run(self) -> tuple[Graph, ArraySource]:
        for op in self.graph.ops:
            args = list(op.args)
            if op.kind == "linear" and (order := self.order_of(args[1])) is not None:
                args[:2] = (
                    self.taken(args[0], self.weight(order, f"{_name(args[1])}.order"), op),
                    self.floats(args[1], op),
                )
            self.build.ops.append(replace(op, args=tuple(self.in_order(a, op) for a in args)))
        done = replace(self.build.graph(self.graph.outputs), arena=self.graph.arena)
        return done, ArraySource(self.arrays)

    def order_of(self, arg: Arg) -> Array | None:
        return (
            self.matrices[arg.name].order if isinstance(arg, Weight) and arg.name in self.matrices else None
        )

    def in_order(self, arg: Arg, op: Op) -> Arg:
        """An operand with the columns that its weight has."""
        if not isinstance(arg, Weight) or arg.name not in self.matrices:
            return arg
        order, floats = self.order_of(arg), self.floats(arg, op)
        if order is None:
            return floats
        return self.taken(floats, self.weight(np.argsort(order), f"{arg.name}.place"), op)

    def floats(self, arg: Arg, op: Op) -> Value:
        """What a matrix's parts stand for in the weight's shape, columns as they are stored."""
        name = _name(arg)
        if name not in self.made:
            grid = self.matrices[name].grid
            parts: dict[str, Arg] = {part: Weight(f"{name}.{part}", kind) for part, kind in grid.parts()}
            args = [parts["q"], parts["scale"], parts.get(ZERO), parts.get(OFFSET)]
            attrs = {"group_size": grid.group_size, "zero": grid.zero or None}
            made = self.build.op("dequantize", *args, name=name, loc=op.loc, **attrs)
            if (shape := tensor_of(arg).shape) != grid.shape:
                made = self.build.op("reshape", made, shape=shape, loc=op.loc)
            self.made[name] = made
        return self.made[name]

    def weight(self, order: Array, name: str) -> Weight:
        """One for all that have the same order."""
        numbers = order.astype(np.int32)
        if numbers.tobytes() not in self.orders:
            self.orders[numbers.tobytes()] = Weight(name, Tensor(DType.I32, numbers.shape))
            self.arrays[name] = numbers
        return self.orders[numbers.tobytes()]

    def taken(self, x: Arg, order: Weight, op: Op) -> Value:
        """x with its last axis in an order."""
        if (x, order) not in self.moved:
            axis = tensor_of(x).rank - 1
            self.moved[x, order] = self.build.op("take", x, order, axis=axis, loc=op.loc)
        return self.moved[x, order]


def _name(arg: Arg) -> str:
    assert isinstance(arg, Weight)
    return arg.name
