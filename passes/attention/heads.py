"""Queries, keys and values as [1,heads,S,size], before a model reshapes, repeats and scales them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy

from ir.dims import product
from ir.graph import Arg, Op, Scalar, Value, Weight
from ir.types import Tensor
from passes.attention.cases import exact
from passes.attention.elements import HEAD
from passes.attention.indexing import Index, Sizes, flatten, pull, shape_of

Emit = Callable[..., Value]


@dataclass(frozen=True)
class Heads:
    """factor times a value that holds `heads` heads; its axes in the order `perm` are [heads..., S, size].

    one: whether it has no axis of sizes, being one number for each head and token.
    every: (first, step) of the heads that are read, where the value has more of them.
    """

    source: Value | Weight
    heads: int
    perm: tuple[int, ...]
    factor: Any
    one: bool = False
    every: tuple[int, int] | None = None

    def emit(self, emit: Emit) -> Value:
        """The value as [1,heads,S,size]; itself if it is that already."""
        shape = shape_of(self.source)
        length_and_size = (shape[self.perm[-1]], 1) if self.one else (shape[axis] for axis in self.perm[-2:])
        last = tuple(length_and_size)
        tail = 1 if self.one else 2
        count = product(tuple(shape[axis] for axis in self.perm[:-tail]))
        found = self.source
        if self.perm != tuple(range(len(shape))):
            found = emit("transpose", found, perm=self.perm)
        if shape_of(found) != (1, count, *last) or isinstance(found, Weight):
            found = emit("reshape", found, shape=(1, count, *last))
        if self.every is None:
            return found
        first, step = self.every
        stop = first + (self.heads - 1) * step + 1
        return emit("slice", found, axis=1, start=first, stop=stop, step=step)

    @property
    def is_plain(self) -> bool:
        shape = shape_of(self.source)
        return len(shape) == 4 and shape[0] == 1 and self.perm == (0, 1, 2, 3) and self.every is None


def find_heads(
    arg: Arg, index: Index, row: Any, column: Any, sizes: Sizes, producer: Callable[[Arg], Op | None]
) -> Heads | None:
    """The best place to read heads from: fewest heads (before they repeat), then where nothing need move.

    index: of element (h, row, column) in arg; column None: of one number for each (h, row). Literal factors
    on the way are taken along.
    """
    found: list[Heads] = []
    factor: Any = sympy.Integer(1)
    while isinstance(arg, Value | Weight):
        here = _heads_at(arg, index, row, column, sizes, factor)
        if here is not None:
            found.append(here)
        op = producer(arg)
        step = None if op is None else _step(op, arg, index, sizes)
        if step is None:
            break
        arg, index, ratio = step
        factor = factor * ratio
    return min(
        found, key=lambda c: (c.heads, c.every is not None, c.factor == 1, not c.is_plain), default=None
    )


def _step(op: Op, out: Arg, index: Index, sizes: Sizes) -> tuple[Arg, Index, Any] | None:
    """One op back: the operand, the index in it, and what its element is multiplied by."""
    assert isinstance(out, Value)
    if op.kind in ("mul", "div"):
        return _scaled(op, index)
    if op.kind == "slice" or op.kind == "split":
        return None
    moved = pull(op, out.name, index, sizes)
    return None if moved is None else (*moved, sympy.Integer(1))


def _scaled(op: Op, index: Index) -> tuple[Arg, Index, Any] | None:
    x, y = op.args
    if isinstance(y, Scalar) and _is_positive(y):
        return x, index, exact(y.value) if op.kind == "mul" else 1 / exact(y.value)
    if isinstance(x, Scalar) and op.kind == "mul" and _is_positive(x):
        return y, index, exact(x.value)
    return None


def _is_positive(x: Scalar) -> bool:
    return not isinstance(x.value, bool) and 0 < x.value < float("inf")


def _heads_at(
    arg: Value | Weight, index: Index, row: Any, column: Any, sizes: Sizes, factor: Any
) -> Heads | None:
    """The value's axes as heads, S and size; None if its index is anything else."""
    shape = shape_of(arg)
    if not isinstance(arg.type, Tensor) or not arg.type.dtype.is_float:
        return None
    rows = [axis for axis, i in enumerate(index) if i == row]
    columns = [axis for axis, i in enumerate(index) if i == column and axis not in rows]
    if len(rows) != 1 or len(columns) != (column is not None):
        return None
    ones = [a for a, size in enumerate(shape) if size == 1 and index[a] == 0 and a not in (*rows, *columns)]
    rest = [a for a in range(len(shape)) if a not in (*rows, *columns, *ones)]
    read = _read_heads([index[a] for a in rest], [shape[a] for a in rest], sizes[HEAD])
    if read is None or shape[rows[0]] != sizes[row] or any(shape[axis] != sizes[column] for axis in columns):
        return None
    heads, every = read
    return Heads(arg, heads, (*ones, *rest, *rows, *columns), factor, column is None, every)


def _read_heads(
    index: Sequence[Any], shape: Sequence[Any], total: int
) -> tuple[int, tuple[int, int] | None] | None:
    """How many heads are read, if head h of `total` reads number h // repeats of all that axes hold, or of
    some at equal distances (first, step)."""
    if not all(isinstance(size, int) for size in shape):
        return None
    flat = flatten(index, shape)
    if flat.free_symbols - {HEAD}:
        return None
    held = int(sympy.prod(shape))
    numbers = [int(flat.xreplace({HEAD: sympy.Integer(h)})) for h in range(total)]
    heads = len(set(numbers))
    if total % heads or numbers[-1] >= held:
        return None
    first = numbers[0]
    step = numbers[total // heads] - first if heads > 1 else 1
    if step < 1 or any(n != first + h // (total // heads) * step for h, n in enumerate(numbers)):
        return None
    return heads, None if heads == held else (first, step)
