"""Converters of ATen ops that move elements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from compiler.importers.context import Context
from compiler.importers.refused import ImportRefused
from ir.dims import Dim, product
from ir.graph import Scalar
from ir.types import DType

Convert = Callable[..., Any]

END = 2**62  # a stop at or beyond this means "to the end"


def _reshape(c: Context, x: Any, *_: Any, **__: Any) -> Any:
    """Any op that keeps the order of elements: the result's shape says it all."""
    return c.reshape(c.tensor(x, c.out.dtype), c.out.shape)


def _transpose(c: Context, x: Any, a: int, b: int) -> Any:
    perm = list(range(c.type(x).rank))
    a, b = c.axis(x, a), c.axis(x, b)
    perm[a], perm[b] = perm[b], perm[a]
    return _permute(c, x, perm)


def _permute(c: Context, x: Any, perm: Any) -> Any:
    perm = tuple(c.axis(x, p) for p in perm)
    return x if perm == tuple(range(len(perm))) else c.op("transpose", x, perm=perm)


def _reverse(c: Context, x: Any) -> Any:
    return _permute(c, x, list(reversed(range(c.type(x).rank))))


def _expand(c: Context, x: Any, *_: Any, **__: Any) -> Any:
    x = c.tensor(x, c.out.dtype)
    return x if c.type(x).shape == c.out.shape else c.op("expand", x, shape=c.out.shape)


def _broadcast_in_dim(c: Context, x: Any, _: Any, places: Sequence[int]) -> Any:
    """The axes of x are at `places` of the result's."""
    sizes: list[Dim] = [1] * len(c.out.shape)
    for size, place in zip(c.type(x).shape, places, strict=True):
        sizes[place] = size
    return _expand(c, c.reshape(x, sizes))


def _bound(c: Context, value: Any, size: Any, otherwise: Any) -> Any:
    """A slice bound inside 0..size, as Python's slices have it."""
    if value is None:
        return otherwise
    if isinstance(value, int) and value >= END:
        return size
    if isinstance(value, int) and value < 0:
        return max(size + value, 0) if isinstance(size, int) else size + value
    if isinstance(value, sympy.Basic) and value.is_negative:
        return size + value
    return min(value, size) if isinstance(value, int) and isinstance(size, int) else value


def _slice(c: Context, x: Any, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Any:
    x = c.tensor(x)
    axis = c.axis(x, axis)
    size = c.type(x).shape[axis]
    start, stop = _bound(c, start, size, 0), _bound(c, stop, size, size)
    if start == 0 and stop == size and step == 1:
        return x
    return c.op("slice", x, axis=axis, start=start, stop=stop, step=None if step == 1 else step)


def _select(c: Context, x: Any, axis: int, index: Any) -> Any:
    axis = c.axis(x, axis)
    size: Any = c.type(x).shape[axis]
    at = size + index if isinstance(index, int) and index < 0 else index
    return c.reshape(c.op("slice", x, axis=axis, start=at, stop=at + 1), c.out.shape)


def _cat(c: Context, tensors: Any, axis: int = 0) -> Any:
    parts = [c.tensor(t, c.out.dtype) for t in tensors]
    parts = [p for p in parts if c.type(p).shape != (0,)]
    return parts[0] if len(parts) == 1 else c.op("concat", *parts, axis=c.axis(parts[0], axis))


def _stack(c: Context, tensors: Any, axis: int = 0) -> Any:
    axis = c.axis(tensors[0], axis, extra=1)
    shape = c.out.shape
    one = (*shape[:axis], 1, *shape[axis + 1 :])
    return c.op("concat", *(c.reshape(c.tensor(t, c.out.dtype), one) for t in tensors), axis=axis)


def _split(c: Context, x: Any, _: Any, axis: int = 0) -> Any:
    """The sizes are those of torch's results."""
    axis = c.axis(x, axis)
    sizes = tuple(c.dim(part.shape[axis]) for part in c.node.meta["val"])
    return (x,) if len(sizes) == 1 else c.op("split", x, axis=axis, sizes=sizes, several=True)


def _repeat(c: Context, x: Any, repeats: Any) -> Any:
    """Each axis n is made [repeat, n] by expand and joined again."""
    shape = c.type(x).shape
    shape = (1,) * (len(repeats) - len(shape)) + shape
    if all(r == 1 for r in repeats):
        return c.reshape(x, shape)
    if all(r == 1 or n == 1 for r, n in zip(repeats, shape, strict=True)):
        return c.op("expand", c.reshape(x, shape), shape=c.out.shape)
    apart = c.reshape(x, [d for n in shape for d in (1, n)])
    wide = c.op("expand", apart, shape=tuple(d for r, n in zip(repeats, shape, strict=True) for d in (r, n)))
    return c.reshape(wide, c.out.shape)


def _repeat_interleave(c: Context, x: Any, repeats: int, dim: Any = None, **_: Any) -> Any:
    """Each element of an axis n is made [n, repeat] by expand and joined again."""
    if dim is None:
        raise ImportRefused(
            "repeat_interleave without an axis has no op", todo="Give it the axis it repeats along"
        )
    axis = c.axis(x, dim)
    shape = c.type(x).shape
    apart = c.reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    wide = c.op("expand", apart, shape=(*shape[: axis + 1], repeats, *shape[axis + 1 :]))
    return c.reshape(wide, c.out.shape)


def _triangle(lower: bool) -> Convert:
    """Keep the elements with column - row <= diagonal (lower) or >= diagonal; the others become zero."""

    def convert(c: Context, x: Any, diagonal: int = 0) -> Any:
        rows, columns = c.out.shape[-2:]
        row = c.reshape(c.op("iota", size=rows, dtype="i32"), (rows, 1))
        column = c.op("iota", size=columns, dtype="i32")
        row = row if diagonal == 0 else c.op("add", row, c.literal(diagonal, DType.I32))
        keep = c.op("le" if lower else "ge", column, row)
        return c.op("where", keep, c.tensor(x), c.literal(0, c.out.dtype))

    return convert


def _pad(c: Context, x: Any, pad: Any, value: Any = 0) -> Any:
    """Constant padding: a filled array at each end of each axis; negative padding cuts."""
    value = 0 if value is None else value
    for back, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        x = _pad_axis(c, x, c.type(x).rank - 1 - back, before, after, value)
    return x


def _pad_axis(c: Context, x: Any, axis: int, before: Any, after: Any, value: Any) -> Any:
    size: Any = c.type(x).shape[axis]
    if (isinstance(before, int) and before < 0) or (isinstance(after, int) and after < 0):
        x = c.op("slice", x, axis=axis, start=max(-before, 0), stop=size + min(after, 0))
    parts = [_filler(c, x, axis, before, value), x, _filler(c, x, axis, after, value)]
    parts = [p for p in parts if p is not None]
    return x if len(parts) == 1 else c.op("concat", *parts, axis=axis)


def _filler(c: Context, x: Any, axis: int, size: Any, value: Any) -> Any:
    if isinstance(size, int) and size <= 0:
        return None
    shape, dtype = c.type(x).shape, c.type(x).dtype
    shape = (*shape[:axis], size, *shape[axis + 1 :])
    return c.op("full", shape=shape, value=c.literal(value, dtype).value, dtype=str(dtype))


def _index_select(c: Context, x: Any, axis: int, index: Any) -> Any:
    if axis == 0:
        c.check_rows(index, x)
    return c.op("take", x, index, axis=c.axis(x, axis))


def _index(c: Context, x: Any, indices: Any) -> Any:
    """x[:, i, :] or x[:, i, j, :] with integer tensors: a take along their axes, joined into one."""
    given = [(axis, i) for axis, i in enumerate(indices) if i is not None]
    if any(c.type(i).dtype is DType.BOOL for _, i in given):
        raise ImportRefused("indexing with a boolean tensor has a size that depends on its values")
    axes = [axis for axis, _ in given]
    sizes = [c.type(x).shape[axis] for axis in axes]
    rows = [_from_start(c, index, size, x) for (_, index), size in zip(given, sizes, strict=True)]
    if len(given) == 1:
        return c.op("take", x, rows[0], axis=axes[0])
    if axes != list(range(axes[0], axes[-1] + 1)):  # the result's axes come first then, as numpy has it
        rest = [axis for axis in range(c.type(x).rank) if axis not in axes]
        x, axes = _permute(c, x, [*axes, *rest]), list(range(len(axes)))
    shape, first, last = c.type(x).shape, axes[0], axes[-1]
    flat = rows[0]
    for row, size in zip(rows[1:], sizes[1:], strict=True):
        flat = c.op("add", c.op("mul", flat, c.tensor(size, DType.I32)), row)
    joined = c.reshape(x, (*shape[:first], product(tuple(sizes)), *shape[last + 1 :]))
    return c.op("take", joined, flat, axis=first)


def _index_put(c: Context, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """x[mask] = number: the one form whose sizes do not depend on values."""
    mask = indices[0]
    is_fill = len(indices) == 1 and c.type(mask).dtype is DType.BOOL and c.type(mask).shape == c.type(x).shape
    if accumulate or not is_fill or (not isinstance(values, Scalar) and c.type(values).shape != ()):
        raise ImportRefused("writing at indices has no op", todo="Write x[mask] = number, or a slice")
    return c.op("where", mask, c.operand(values, c.out.dtype), c.tensor(x))


def _from_start(c: Context, index: Any, size: Any, x: Any) -> Any:
    """An index that is never negative: torch counts negative ones from the end."""
    index = c.tensor(index, DType.I32)
    least = c.least(index)
    if least is None or least < 0:
        below = c.op("lt", index, c.literal(0, DType.I32))
        return c.op("where", below, c.op("add", index, c.tensor(size, DType.I32)), index)
    c.check_rows(index, x, size)
    return index


def _slice_scatter(
    c: Context, x: Any, source: Any, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1
) -> Any:
    """x with a run of an axis, or every so many elements of it, replaced by source."""
    axis = c.axis(x, axis)
    size: Any = c.type(x).shape[axis]
    start, stop = _bound(c, start, size, 0), _bound(c, stop, size, size)
    if step != 1:
        return _strided(c, x, source, axis, range(size)[start:stop:step] if isinstance(size, int) else None)
    before = None if start == 0 else c.op("slice", x, axis=axis, start=0, stop=start)
    after = None if stop == size else c.op("slice", x, axis=axis, start=stop, stop=size)
    parts = [p for p in (before, c.tensor(source, c.out.dtype), after) if p is not None]
    return parts[0] if len(parts) == 1 else c.op("concat", *parts, axis=axis)


def _strided(c: Context, x: Any, source: Any, axis: int, places: range | None) -> Any:
    """x with the elements at some places of an axis of fixed size replaced by source's."""
    if places is None:
        raise ImportRefused("writing some of the tokens has no op", todo="Choose by torch.where")
    size, at = c.type(x).shape[axis], c.op("iota", size=c.type(x).shape[axis], dtype="i32")
    from_first = c.op("sub", at, c.literal(places.start, DType.I32))
    chosen = c.op("eq", c.op("mod", from_first, c.literal(places.step, DType.I32)), c.literal(0, DType.I32))
    for kind, bound in (("ge", places.start), ("lt", places.stop)):
        chosen = c.op("and", chosen, c.op(kind, at, c.literal(bound, DType.I32)))
    in_source = c.op("floordiv", from_first, c.literal(places.step, DType.I32))
    index = c.op("where", chosen, c.op("add", in_source, c.tensor(size, DType.I32)), at)
    both = c.op("concat", c.tensor(x, c.out.dtype), c.tensor(source, c.out.dtype), axis=axis)
    return c.op("take", both, index, axis=axis)


def _select_scatter(c: Context, x: Any, source: Any, axis: int, index: Any) -> Any:
    axis = c.axis(x, axis)
    shape = c.type(x).shape
    size: Any = shape[axis]
    at = size + index if isinstance(index, int) and index < 0 else index
    row = c.reshape(c.tensor(source, c.out.dtype), (*shape[:axis], 1, *shape[axis + 1 :]))
    return _slice_scatter(c, x, row, axis, at, at + 1)


def _roll(c: Context, x: Any, shifts: Any, dims: Any = ()) -> Any:
    """What leaves an axis at its end comes in at its start."""
    if len(shifts) != len(dims):
        raise ImportRefused("a roll of all axes as one has no op", todo="Name the axes")
    for shift, dim in zip(shifts, dims, strict=True):
        axis = c.axis(x, dim)
        size: Any = c.type(x).shape[axis]
        if isinstance(size, int):
            shift = shift % size if size else 0
        elif abs(shift) > 1:  # which sequences of fewer tokens take round again
            raise ImportRefused(f"a roll by {shift} along the tokens has no op", todo="Roll by 1")
        cut = size - shift if shift > 0 else -shift
        if shift:
            parts = [c.op("slice", x, axis=axis, start=cut, stop=size)]
            x = c.op("concat", *parts, c.op("slice", x, axis=axis, start=0, stop=cut), axis=axis)
    return x


def _embedding(c: Context, table: Any, ids: Any, *_: Any, **__: Any) -> Any:
    c.check_rows(ids, table)
    return c.op("embed", ids, table)


TABLE: dict[str, Convert] = {
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten.reshape.default": _reshape,
    "aten.view_copy.default": _reshape,
    "aten.unsqueeze.default": _reshape,
    "aten.squeeze.default": _reshape,
    "aten.squeeze.dim": _reshape,
    "aten.squeeze.dims": _reshape,
    "aten.flatten.using_ints": _reshape,
    "aten.unflatten.int": _reshape,
    "aten.transpose.int": _transpose,
    "aten.permute.default": _permute,
    "aten.t.default": _reverse,
    "aten.numpy_T.default": _reverse,
    "prims.broadcast_in_dim.default": _broadcast_in_dim,
    "aten.expand.default": _expand,
    "aten.expand_as.default": _expand,
    "aten.broadcast_to.default": _expand,
    "aten.slice.Tensor": _slice,
    "aten.narrow.default": lambda c, x, axis, start, length: _slice(c, x, axis, start, start + length),
    "aten.select.int": _select,
    "aten.cat.default": _cat,
    "aten.concat.default": _cat,
    "aten.stack.default": _stack,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    "aten.repeat.default": _repeat,
    "aten.repeat_interleave.self_int": _repeat_interleave,
    "aten.tril.default": _triangle(lower=True),
    "aten.triu.default": _triangle(lower=False),
    "aten.constant_pad_nd.default": _pad,
    "aten.pad.default": lambda c, x, pad, mode="constant", value=None: _pad_constant(c, x, pad, mode, value),
    "aten.index_select.default": _index_select,
    "aten.index.Tensor": _index,
    "aten.index_put.default": _index_put,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.roll.default": _roll,
    "aten.select_scatter.default": _select_scatter,
    "aten.embedding.default": _embedding,
}


def _pad_constant(c: Context, x: Any, pad: Any, mode: str, value: Any) -> Any:
    if mode != "constant":
        raise ImportRefused(f"padding in mode {mode!r} has no op", todo="Use 'constant'")
    return _pad(c, x, pad, value)
