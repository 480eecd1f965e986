"""A graph on quantised matrices: `dequantize` of codes in place of the weights that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from compiler.importers.quantized.matrix import OFFSET, ZERO, Matrix
from compiler.importers.quantized.order import OTHER_ORDER
from compiler.importers.refused import ImportRefused
from ir.build import GraphBuilder
from ir.graph import Arg, Graph, Value, Weight


def keep_grids(graph: Graph, matrices: Mapping[str, Matrix], where: str) -> Graph:
    """The graph on the matrices' parts, `@NAME.q`, `@NAME.scale` and so on. matrices: by weights' names.

    Raises ImportRefused on codes that are in another order than the weight's columns.
    """
    moved = [w.name for w in graph.weights if w.name in matrices and matrices[w.name].order is not None]
    if moved:
        what = f"its columns are in another order than their groups (act-order): {len(moved)} tensors are so"
        todo = f"Compile it without its own grid, as floats. {OTHER_ORDER}"
        raise ImportRefused(what, where=f"{where}, tensor {moved[0]!r}", todo=todo)
    build = GraphBuilder(graph.name, graph.dims, graph.inputs)
    build.reserve(out.name for op in graph.ops for out in op.outs)
    made: dict[str, Value] = {}
    for op in graph.ops:
        for arg in op.args:
            if isinstance(arg, Weight) and arg.name in matrices and arg.name not in made:
                made[arg.name] = _dequantize(build, arg.name, matrices[arg.name], op.loc)
        build.ops.append(replace(op, args=tuple(_now(arg, made) for arg in op.args)))
    return replace(build.graph(graph.outputs), arena=graph.arena)


def _now(arg: Arg, made: Mapping[str, Value]) -> Arg:
    return made.get(arg.name, arg) if isinstance(arg, Weight) else arg


def _dequantize(build: GraphBuilder, name: str, matrix: Matrix, loc: str) -> Value:
    grid = matrix.grid
    parts: dict[str, Arg] = {part: Weight(f"{name}.{part}", kind) for part, kind in grid.parts()}
    args = [*(parts.pop(part) for part in ("q", "scale")), parts.get(ZERO), parts.get(OFFSET)]
    return build.op(
        "dequantize", *args, name=name, loc=loc, group_size=grid.group_size, zero=grid.zero or None
    )
