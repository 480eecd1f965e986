"""Matrices whose rows are those of dequantised ones, seen through what moves whole rows: concat, slice and
split of rows, and a stack of experts' rows laid out as one matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ir.graph import Arg, Op, Value
from ir.rewrite import View
from passes.match import attribute, dtype, last_axis, operand, shape

Producer = Callable[[Arg], Op | None]
_MOVES = ("concat", "slice", "split")  # along any axis but the last
NUM_PARTS = 4  # operands of dequantize: codes, scale, zero, offset


def dequantize_of(producer: Producer, arg: Arg) -> Op | None:
    """A `dequantize` that rows of a matrix come from, where all of them come from some of one format."""
    found = list(_leaves(producer, arg))
    return found[0] if found and None not in found and len({_format(op) for op in found if op}) == 1 else None


def _leaves(producer: Producer, arg: Arg) -> Iterator[Op | None]:
    op = producer(arg)
    if op is not None and op.kind == "dequantize":
        yield op
    elif op is not None and _moves_rows(op):
        for each in op.args:
            yield from _leaves(producer, each)
    else:
        yield None


def _moves_rows(op: Op) -> bool:
    if op.kind == "reshape":
        return shape(op.args[0])[-1:] == shape(op.out)[-1:]
    return op.kind in _MOVES and attribute(op, "axis") != last_axis(op.args[0])


def code_format(makers: Mapping[str, Op], arg: Arg) -> tuple[Any, ...]:
    """Of what a matrix is dequantised from; () where it is not."""
    found = dequantize_of(lambda a: makers.get(a.name) if isinstance(a, Value) else None, arg)
    return () if found is None else _format(found)


def _format(op: Op) -> tuple[Any, ...]:
    """What two must share so that their parts can lie in one array."""
    kinds = tuple(dtype(operand(op, i)) for i in range(NUM_PARTS))
    return (*kinds, *(attribute(op, name) for name in ("group_size", "zero", "dtype")))


def part_of(view: View, arg: Arg, index: int) -> Arg:
    """One part of such a matrix, an operand of dequantize: 0 codes, 1 scale, 2 zero, 3 offset."""
    op = view.producer(arg)
    assert op is not None and isinstance(arg, Value)
    if op.kind == "dequantize":
        return operand(op, index)
    parts = [part_of(view, each, index) for each in op.args]
    if parts[0] is None:
        return None
    attrs = dict(op.attrs)
    if op.kind == "reshape":
        attrs["shape"] = (*shape(op.out)[:-1], shape(parts[0])[-1])
    made = view.ops(op.kind, *parts, loc=op.loc, **attrs)
    return made[op.outs.index(arg)]
