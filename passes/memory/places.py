"""Where each value of a paged graph lies in memory: which values are views of others.

A value [A, ...] is A rows, `ld` elements apart, each of contiguous elements; a view shares its root's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy

from ir.dims import Dim, normalize, product
from ir.graph import Graph, Op, Value, tensor_of
from ir.types import Tensor
from passes.match import attribute


@dataclass(frozen=True)
class Place:
    """Element [i, j] of a value (j over the flattened rest) is element offset + i * ld + j of `root`."""

    root: str
    offset: Dim
    ld: Dim


def row_size(type_: Tensor) -> Dim:
    """Elements of one row: all axes but the first."""
    return product(type_.shape[1:])


def places(graph: Graph) -> dict[str, Place]:
    """The place of every tensor that is not a constant."""
    constants = graph.constants()
    found = {v.name: _own(v) for v in graph.inputs if isinstance(v.type, Tensor)}
    for op in graph.ops:
        for index, out in enumerate(op.outs):
            if isinstance(out.type, Tensor) and out.name not in constants:
                found[out.name] = _view(op, index, found) or _own(out)
    return found


def is_view(op: Op, found: Mapping[str, Place]) -> bool:
    """Whether all results of an op lie in its operand's memory, so that nothing has to run."""
    return all(o.name in found and found[o.name].root != o.name for o in op.outs)


def _own(value: Value) -> Place:
    return Place(value.name, 0, row_size(tensor_of(value)))


def _view(op: Op, index: int, found: Mapping[str, Place]) -> Place | None:
    source = op.args[0] if op.args else None
    if op.kind not in _VIEWS or not isinstance(source, Value) or source.name not in found:
        return None
    return _VIEWS[op.kind](op, index, tensor_of(source), found[source.name])


def _reshape(op: Op, index: int, x: Tensor, place: Place) -> Place | None:
    out = tensor_of(op.outs[index])
    if x.rank and out.rank and x.shape[0] == out.shape[0]:
        return place
    contiguous = not x.rank or place.ld == row_size(x)
    return Place(place.root, place.offset, row_size(out)) if contiguous else None


def _expand(op: Op, index: int, x: Tensor, place: Place) -> Place | None:
    return place if x.shape == tensor_of(op.outs[index]).shape else None


def _slice(op: Op, index: int, x: Tensor, place: Place) -> Place | None:
    return _part(x, op.attr("axis"), op.attr("start"), place) if attribute(op, "step") == 1 else None


def _split(op: Op, index: int, x: Tensor, place: Place) -> Place | None:
    return _part(x, op.attr("axis"), sum(op.attr("sizes")[:index]), place)


def _part(x: Tensor, axis: int, start: Any, place: Place) -> Place | None:
    """A contiguous range of one axis: rows, or elements of a row where only that axis precedes them."""
    if axis == 0:
        return Place(place.root, _sum(place.offset, start, place.ld), place.ld)
    if product(x.shape[1:axis]) != 1:
        return None
    return Place(place.root, _sum(place.offset, start, product(x.shape[axis + 1 :])), place.ld)


def _sum(offset: Dim, count: Any, size: Dim) -> Dim:
    return normalize(sympy.Integer(0) + offset + count * size)


_VIEWS = {"reshape": _reshape, "expand": _expand, "slice": _slice, "split": _split}
