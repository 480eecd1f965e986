"""Converters of ONNX's ops that move elements, and of those that make constants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import sympy

from compiler.importers.onnx.context import MAX_KNOWN, Context, Convert, Held, Known, plain_array
from compiler.importers.onnx.formula import Formula, at, axis, formula, moved
from compiler.importers.refused import ImportRefused
from ir.dims import Dim, normalize, product
from ir.types import DType

LARGE = 2**31 - 1  # what exporters write for "to the end" is at least this


def sizes(values: Sequence[Any]) -> Known:
    """A vector of integers, or of expressions of S."""
    return Known(plain_array(np.array(list(values), object)))


def _shape(c: Context, x: Held, *, start: int = 0, end: int | None = None) -> Held:
    return sizes(c.shape(x)[slice(start, end)])


def _size(c: Context, x: Held) -> Held:
    return Known(plain_array(np.array(product(c.shape(x)), object)))


def expand(c: Context, x: Held, shape: Sequence[Dim]) -> Held:
    shape = tuple(normalize(n) for n in shape)
    if c.shape(x) == shape:
        return x
    if isinstance(x, Known) and all(isinstance(n, int) for n in shape) and np.prod(shape) <= MAX_KNOWN:  # type: ignore[arg-type]
        return Known(np.broadcast_to(x.array, shape))  # type: ignore[arg-type]
    small = c.as_formula(x)
    if small is not None:
        extra = len(shape) - small.rank
        return at(small, shape, {i: axis(i + extra) for i in range(small.rank)})
    return c.op("expand", c.tensor(x), shape=shape)


def _expand(c: Context, x: Held, shape: Held) -> Held:
    wanted, have = c.integers(shape, "shape"), c.shape(x)
    rank = max(len(wanted), len(have))
    pairs = zip((1,) * (rank - len(have)) + have, [1] * (rank - len(wanted)) + wanted, strict=True)
    return expand(c, x, [b if a == 1 else a for a, b in pairs])


def reshape(c: Context, x: Held, shape: Sequence[Dim]) -> Held:
    shape = tuple(normalize(n) for n in shape)
    if c.shape(x) == shape:
        return x
    if isinstance(x, Known) and all(isinstance(n, int) for n in shape):
        if x.array.size != product(shape):
            raise ImportRefused(f"{list(x.shape)} has not as many elements as {list(shape)}")
        return Known(x.array.reshape(shape))  # type: ignore[arg-type]
    if isinstance(x, Formula) and (found := _reshaped(x, shape)) is not None:
        return found
    return c.op("reshape", c.tensor(x), shape=shape)


def _reshaped(x: Formula, shape: tuple[Dim, ...]) -> Formula | None:
    """A formula with axes of size 1 put in or taken out, or the same everywhere."""
    old = [i for i, n in enumerate(x.shape) if n != 1]
    new = [i for i, n in enumerate(shape) if n != 1]
    if x.is_constant and product(x.shape) == product(shape):
        return formula(x.dtype, shape, x.expr)
    if [x.shape[i] for i in old] != [shape[i] for i in new]:
        return None
    return at(x, shape, {a: axis(b) for a, b in zip(old, new, strict=True)})


def _reshape(c: Context, x: Held, shape: Held, *, allowzero: int = 0) -> Held:
    have, wanted = c.shape(x), c.integers(shape, "shape")
    if not allowzero:
        wanted = [have[i] if n == 0 and i < len(have) else n for i, n in enumerate(wanted)]
    return reshape(c, x, with_rest(have, wanted))


def with_rest(have: Sequence[Dim], wanted: Sequence[Any]) -> list[Dim]:
    """A shape whose -1 is what is left over."""
    open_axes = [i for i, n in enumerate(wanted) if n == -1]
    if not open_axes:
        return list(wanted)
    total, rest = product(tuple(have)), product(tuple(n for n in wanted if n != -1))
    left: Any = sympy.cancel(sympy.sympify(total) / rest) if rest != 0 else sympy.Integer(0)
    if len(open_axes) > 1 or not left.is_polynomial() or not left.is_integer:
        raise ImportRefused(f"{list(have)} cannot be reshaped to {list(wanted)}")
    return [normalize(left) if n == -1 else n for n in wanted]


def _flatten(c: Context, x: Held, *, axis: int = 1) -> Held:
    have = c.shape(x)
    at_axis = axis % (len(have) + 1) if axis < 0 else axis
    return reshape(c, x, (product(have[:at_axis]), product(have[at_axis:])))


def _axes(c: Context, given: Held | None, axes: Any) -> list[int] | None:
    if axes is not None:
        return list(axes)
    return None if given is None else c.integers(given, "axes")


def unsqueeze(c: Context, x: Held, given: Held | None = None, *, axes: Any = None) -> Held:
    rank = c.rank(x)
    numbers = _axes(c, given, axes) or []
    places = sorted(n % (rank + len(numbers)) for n in numbers)
    shape = list(c.shape(x))
    for place in places:
        shape.insert(place, 1)
    return reshape(c, x, shape)


def _squeeze(c: Context, x: Held, given: Held | None = None, *, axes: Any = None) -> Held:
    have, numbers = c.shape(x), _axes(c, given, axes)
    out = [i for i, n in enumerate(have) if n == 1] if numbers is None else [c.axis(x, n) for n in numbers]
    if any(have[i] != 1 for i in out):
        raise ImportRefused(f"{list(have)} has no axes {out} of size 1")
    return reshape(c, x, [n for i, n in enumerate(have) if i not in out])


def transpose(c: Context, x: Held, *, perm: Sequence[int] | None = None) -> Held:
    order = tuple(perm) if perm is not None else tuple(reversed(range(c.rank(x))))
    if sorted(order) != list(range(c.rank(x))):
        raise ImportRefused(f"perm {list(order)} of {c.rank(x)} axes")
    if isinstance(x, Known):
        return Known(x.array.transpose(order))
    if isinstance(x, Formula):
        return at(x, [x.shape[p] for p in order], {p: axis(i) for i, p in enumerate(order)})
    if order == tuple(range(c.rank(x))):
        return x
    return c.op("transpose", x, perm=order)


def _slice(
    c: Context,
    x: Held,
    starts: Held | None = None,
    ends: Held | None = None,
    axes: Held | None = None,
    steps: Held | None = None,
) -> Held:
    first, last = c.integers(starts, "start"), c.integers(ends, "end")
    numbers = list(range(len(first))) if axes is None else c.integers(axes, "axes")
    strides = [1] * len(first) if steps is None else c.integers(steps, "steps")
    for number, lo, hi, step in zip(numbers, first, last, strides, strict=True):
        x = cut(c, x, c.axis(x, number), lo, hi, int(step))
    return x


def cut(c: Context, x: Held, number: int, lo: Any, hi: Any, step: int = 1) -> Held:
    """x[lo:hi:step] of one axis, ends as Python has them."""
    size = c.shape(x)[number]
    if isinstance(x, Known) and all(isinstance(n, int) for n in (lo, hi)):
        return Known(x.array[(slice(None),) * number + (_python_slice(lo, hi, step),)])
    if step < 1:
        raise ImportRefused(f"a slice in steps of {step} has no op")
    start, stop = _place(c, lo, size), _place(c, hi, size)
    if (start, stop, step) == (0, size, 1):
        return x
    length = sympy.sympify(stop) - start
    if isinstance(x, Formula) and step == 1:
        shape = (*x.shape[:number], normalize(length), *x.shape[number + 1 :])
        return at(x, shape, {number: axis(number) + start})
    return c.op("slice", c.tensor(x), axis=number, start=start, stop=stop, step=None if step == 1 else step)


def _python_slice(lo: int, hi: int, step: int) -> slice:
    return slice(lo, None if step < 0 and hi < -LARGE else hi, step)


def _place(c: Context, end: Any, size: Any) -> Any:
    """A start or end inside an axis. Raises ImportRefused where it depends on the length which it is."""
    if isinstance(end, int) and isinstance(size, int):
        return min(max(end + size if end < 0 else end, 0), size)
    if isinstance(end, int) and abs(end) >= LARGE:
        return size if end > 0 else 0
    place = sympy.expand(end + size) if isinstance(end, int) and end < 0 else sympy.sympify(end)
    if place.is_negative or c.bound(place) <= 0:
        return 0
    if c.bound(sympy.expand(place - size)) <= 0:
        return normalize(place)
    if c.bound(sympy.expand(size - place)) <= 0:
        return size
    raise ImportRefused(
        f"it cuts an axis of {size} at {place}, which is beyond its end at some lengths",
        todo="Compile with a smaller --max-context",
    )


def _split(c: Context, x: Held, given: Held | None = None, **attrs: Any) -> tuple[Held, ...]:
    number = c.axis(x, attrs.get("axis", 0))
    size, count = c.shape(x)[number], attrs.get("num_outputs", len(c.outputs))
    parts = attrs.get("split") or (None if given is None else c.integers(given, "split"))
    if parts is None:
        if not isinstance(size, int):
            raise ImportRefused(f"splits an axis of {size}")
        each = -(-size // count)
        parts = [min(each, size - i * each) for i in range(count)]
    if not isinstance(x, Known | Formula):
        return c.op("split", x, axis=number, sizes=tuple(parts), several=True)
    ends = [sum(parts[: i + 1]) for i in range(len(parts))]
    return tuple(cut(c, x, number, e - n, e) for e, n in zip(ends, parts, strict=True))


def _concat(c: Context, *xs: Held, axis: int = 0) -> Held:
    number = c.axis(xs[0], axis)
    rest = [x for x in xs if c.shape(x)[number] != 0] or list(xs[:1])  # an empty past has no elements
    if len(rest) == 1:
        return rest[0]
    if all(isinstance(x, Known) for x in rest):
        return Known(_concatenated([x.array for x in rest], number))  # type: ignore[union-attr]
    parts = [c.as_formula(x) for x in rest]
    if all(p is not None for p in parts):
        return _joined(parts, number)  # type: ignore[arg-type]
    dtype = next(c.dtype(x) for x in rest if not isinstance(x, Known))
    return c.op("concat", *(c.tensor(x, dtype) for x in rest), axis=number)


def _concatenated(arrays: Sequence[Any], number: int) -> Any:
    found = np.concatenate(arrays, number)
    return plain_array(found) if found.dtype == object else found


def _joined(parts: Sequence[Formula], number: int) -> Formula:
    """Formulas one after the other: one expression where each goes on where the one before ends."""
    here, total = axis(number), sympy.Integer(0)
    pieces: list[tuple[Any, Any]] = []
    for part in parts:
        begin, total = total, sympy.expand(total + part.shape[number])
        expr = moved(part.expr, {here: here - begin})
        pieces.append((sympy.expand(expr) if part.dtype is DType.I32 else expr, total))
    shape = (*parts[0].shape[:number], total, *parts[0].shape[number + 1 :])
    whole = _one_expression(parts, pieces, here, number)
    if whole is None:
        *others, last = pieces
        cases = [(e, here < end) for e, end in others]
        whole = sympy.Piecewise(*cases, (last[0], True))
    return formula(parts[0].dtype, shape, whole)


def _one_expression(parts: Sequence[Formula], pieces: Sequence[Any], here: Any, number: int) -> Any:
    candidate = pieces[-1][0]
    begin = sympy.Integer(0)
    for part, (expr, end) in zip(parts, pieces, strict=True):
        inside = {here: begin} if part.shape[number] == 1 else {}
        if moved(expr, inside) != moved(candidate, inside):
            return None
        begin = end
    return candidate


def _tile(c: Context, x: Held, repeats: Held) -> Held:
    times = c.integers(repeats, "repeats")
    have = c.shape(x)
    if any(n != 1 and t != 1 for n, t in zip(have, times, strict=True)):
        apart = [d for n, t in zip(have, times, strict=True) for d in ((1, n) if t != 1 else (n,))]
        wide = [d for n, t in zip(have, times, strict=True) for d in ((t, n) if t != 1 else (n,))]
        return reshape(
            c, expand(c, reshape(c, x, apart), wide), [n * t for n, t in zip(have, times, strict=True)]
        )
    return expand(c, x, [t if n == 1 else n for n, t in zip(have, times, strict=True)])


def _range(c: Context, start: Held, limit: Held, delta: Held) -> Held:
    first, last, step = (c.known(x, "bounds").reshape(-1)[0] for x in (start, limit, delta))
    if any(isinstance(n, np.floating | float) for n in (first, last, step)):
        count = max(0, int(np.ceil((last - first) / step)))
        if count > MAX_KNOWN:
            raise ImportRefused(f"a range of {count} fractions")
        return Known((first + np.arange(count) * step).astype(np.float32))
    first, last, step = (int(n) if isinstance(n, np.integer) else n for n in (first, last, step))
    if not isinstance(step, int) or step < 1:
        raise ImportRefused(f"a range in steps of {step} has no op")
    length = normalize(-((first - sympy.sympify(last)) // step) if step != 1 else sympy.sympify(last) - first)
    if isinstance(length, int) and isinstance(first, int) and length <= MAX_KNOWN:
        return Known(np.arange(first, last, step))
    return formula(DType.I32, (length,), first + axis(0) * step)


def _constant_of_shape(c: Context, shape: Held, *, value: Known | None = None) -> Held:
    element = Known(np.zeros((1,), np.float32)) if value is None else value
    one = Known(element.array.reshape(()))
    wanted = tuple(c.integers(shape, "shape"))
    if all(isinstance(n, int) for n in wanted):
        count = int(np.prod(wanted, dtype=np.float64))
        if count <= MAX_KNOWN:
            return Known(np.full(wanted, one.number, one.array.dtype))
    if one.dtype.is_float:
        return c.op("full", shape=wanted, value=float(one.number), dtype="f32")
    found = c.as_formula(one)
    assert found is not None
    return formula(found.dtype, wanted, found.expr)


def _constant(c: Context, **attrs: Any) -> Held:
    for name in ("value", "value_float", "value_floats", "value_int", "value_ints"):
        if name in attrs:
            given = attrs[name]
            kind = np.float32 if "float" in name else np.int64
            return given if isinstance(given, Known) else Known(np.array(given, kind))
    raise ImportRefused(f"a constant of {sorted(attrs)} is not read")


def _trilu(c: Context, x: Held, k: Held | None = None, *, upper: int = 1) -> Held:
    shift = 0 if k is None else c.integers(k, "k")[0]
    rank = c.rank(x)
    row, column = axis(rank - 2), axis(rank - 1)
    inside = column - row >= shift if upper else column - row <= shift
    keep = formula(DType.BOOL, c.shape(x), inside)
    if isinstance(x, Known) and all(isinstance(n, int) for n in (shift, *x.shape)):
        return Known((np.triu if upper else np.tril)(x.array, shift))
    if c.dtype(x) is DType.BOOL:
        return c.pointwise("and", x, keep)
    zero = Known(np.zeros((), np.float32 if c.dtype(x).is_float else np.int64))
    return c.pointwise("where", keep, x, zero)


TABLE: dict[str, Convert] = {
    "Shape": _shape,
    "Size": _size,
    "Expand": _expand,
    "Reshape": _reshape,
    "Flatten": _flatten,
    "Unsqueeze": unsqueeze,
    "Squeeze": _squeeze,
    "Transpose": transpose,
    "Slice": _slice,
    "Split": _split,
    "Concat": _concat,
    "Tile": _tile,
    "Range": _range,
    "ConstantOfShape": _constant_of_shape,
    "Constant": _constant,
    "Trilu": _trilu,
    "Identity": lambda c, x: x,
    "Dropout": lambda c, x, *_, **__: (x, None),
}
