"""Weights and what is computed from weights alone, whole or a few rows at a time.

Such ops are evaluated once, when weights are packed, with the op table's numpy references.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from ir.graph import Arg, Graph, Op, Scalar, Value, Weight, tensor_of
from ir.ops import OPS, RefCall
from passes.match import attribute

Array = np.ndarray[Any, np.dtype[Any]]


class Reader(Protocol):
    """Finds weights by name; rows lo..hi of the first axis, in the element type they are stored in."""

    def rows(self, name: str, lo: int, hi: int) -> Array: ...

    def read(self, name: str) -> Array: ...


class Evaluator:
    """Values that depend on weights alone, whole or a range of rows at a time."""

    def __init__(self, graph: Graph, reader: Reader) -> None:
        self._reader = reader
        self._makers: Mapping[str, Op] = graph.producers()
        self._last: tuple[str, Array] | None = None  # the value that was computed whole most recently

    def rows(self, arg: Arg, lo: int, hi: int) -> Array:
        """Rows lo..hi of the first axis, in the element type that the graph gives the operand."""
        if isinstance(arg, Weight):
            return self._reader.rows(arg.name, lo, hi).astype(tensor_of(arg).dtype.numpy, copy=False)
        assert isinstance(arg, Value)
        op = self._makers[arg.name]
        rule = _ROW_RULES.get(op.kind)
        if rule is None and OPS[op.kind].pointwise:
            rule = _pointwise_rows
        found = rule(self, op, op.outs.index(arg), lo, hi) if rule is not None else None
        return self.whole(arg)[lo:hi] if found is None else found

    def whole(self, arg: Weight | Value) -> Array:
        if isinstance(arg, Weight):
            return self._reader.read(arg.name).astype(tensor_of(arg).dtype.numpy, copy=False)
        if self._last is not None and self._last[0] == arg.name:
            return self._last[1]
        self._last = None
        op = self._makers[arg.name]
        args = [self.whole(a) if isinstance(a, Weight | Value) else _plain(a) for a in op.args]
        made = apply(op, args, {})[op.outs.index(arg)]
        self._last = (arg.name, made)
        return made


def apply(op: Op, args: list[Any], attrs: Mapping[str, Any]) -> list[Array]:
    """An op's numpy reference, with some attributes replaced."""
    full = {**OPS[op.kind].complete(op.attrs), **attrs}
    with np.errstate(all="ignore"):
        return list(OPS[op.kind].reference(RefCall(op.kind, tuple(args), full, np.float32)))


def _plain(arg: Arg) -> Any:
    return arg.value if isinstance(arg, Scalar) else None


def _shape(arg: Arg) -> tuple[int, ...]:
    return tuple(int(d) for d in tensor_of(arg).shape)


def _pointwise_rows(ev: Evaluator, op: Op, index: int, lo: int, hi: int) -> Array | None:
    shape = _shape(op.outs[index])
    args: list[Any] = []
    for arg in op.args:
        if not isinstance(arg, Weight | Value):
            args.append(_plain(arg))
        elif len(_shape(arg)) == len(shape) and _shape(arg)[0] == shape[0]:
            args.append(ev.rows(arg, lo, hi))
        else:
            args.append(ev.whole(arg))
    return apply(op, args, {})[index]


def _concat_rows(ev: Evaluator, op: Op, index: int, lo: int, hi: int) -> Array | None:
    if op.attrs["axis"] != 0:
        return np.concatenate([ev.rows(a, lo, hi) for a in op.args], op.attrs["axis"])
    parts, start = [], 0
    for arg in op.args:
        count = _shape(arg)[0]
        first, last = max(lo - start, 0), min(hi - start, count)
        if first < last:
            parts.append(ev.rows(arg, first, last))
        start += count
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _slice_rows(ev: Evaluator, op: Op, index: int, lo: int, hi: int) -> Array | None:
    if op.attrs["axis"] != 0:
        return apply(op, [ev.rows(op.args[0], lo, hi)], {})[0]
    start = op.attrs["start"]
    return ev.rows(op.args[0], start + lo, start + hi) if attribute(op, "step") == 1 else None


def _split_rows(ev: Evaluator, op: Op, index: int, lo: int, hi: int) -> Array | None:
    if op.attrs["axis"] != 0:
        return apply(op, [ev.rows(op.args[0], lo, hi)], {})[index]
    start = sum(op.attrs["sizes"][:index])
    return ev.rows(op.args[0], start + lo, start + hi)


def _reshape_rows(ev: Evaluator, op: Op, index: int, lo: int, hi: int) -> Array | None:
    shape = _shape(op.outs[index])
    source = _shape(op.args[0])
    if source and shape and source[0] == shape[0]:
        return ev.rows(op.args[0], lo, hi).reshape(hi - lo, *shape[1:])
    if len(source) < 2 or source[2:] != shape[1:] or source[0] * source[1] != shape[0] or lo == hi:
        return None
    return _stacked_rows(ev, op.args[0], source[1], lo, hi)


def _stacked_rows(ev: Evaluator, arg: Arg, count: int, lo: int, hi: int) -> Array:
    """Rows lo..hi of matrices of `count` rows each, stacked."""
    first, last = lo // count, -(-hi // count)
    part = ev.rows(arg, first, last)
    cuts = [slice(max(0, lo - i * count), min(count, hi - i * count)) for i in range(first, last)]
    parts = [matrix[cut] for matrix, cut in zip(part, cuts, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _transpose_rows(ev: Evaluator, op: Op, index: int, lo: int, hi: int) -> Array | None:
    return apply(op, [ev.rows(op.args[0], lo, hi)], {})[0] if op.attrs["perm"][0] == 0 else None


def _each_row(ev: Evaluator, op: Op, index: int, lo: int, hi: int) -> Array | None:
    """Of ops that work on each row of all operands alone."""
    args = [ev.rows(a, lo, hi) if isinstance(a, Weight | Value) else _plain(a) for a in op.args]
    return apply(op, args, {})[index]


_ROW_RULES = {
    "dequantize": _each_row, "quantize_weight": _each_row,
    "concat": _concat_rows, "slice": _slice_rows, "split": _split_rows, "reshape": _reshape_rows,
    "transpose": _transpose_rows,
}  # fmt: skip
