"""Arrays that are put together from stored ones: stacked, joined, cut, with axes or rows in another order.

Nothing is read before it is asked for, and then no more than what is inside the bounds asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from compiler.weights import Array, WeightSource
from ir.dims import evaluate
from ir.types import DType

Bounds = tuple[tuple[int, int], ...]  # of each axis the first index and the one after the last
_EXACT_IN_F32 = (DType.BF16, DType.F16, DType.F32)


class Arrangement(Protocol):
    @property
    def dtype(self) -> DType: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, bounds: Bounds) -> Array:
        """What is inside the bounds; a view where that is possible."""
        ...


class Misfit(Exception):
    """Arrays cannot be put together. part: the first one that does not fit."""

    def __init__(self, what: str, part: Arrangement) -> None:
        super().__init__(what)
        self.what, self.part = what, part


def whole(array: Arrangement) -> Bounds:
    return tuple((0, n) for n in array.shape)


@dataclass(frozen=True)
class Stored:
    """An array as a source has it."""

    source: WeightSource
    name: str
    dtype: DType = field(init=False)
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        found = self.source.type(self.name)
        _set(self, found.dtype, tuple(evaluate(n, {}) for n in found.shape))

    def read(self, bounds: Bounds) -> Array:
        if not bounds:
            return self.source.read(self.name)
        return self.source.rows(self.name, *bounds[0])[_index(((0, None), *bounds[1:]))]


@dataclass(frozen=True)
class Stack:
    """Arrays of one shape along a new axis."""

    parts: tuple[Arrangement, ...]
    axis: int = 0
    dtype: DType = field(init=False)
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_axis(self.axis, len(self.parts[0].shape) + 1, self.parts[0])
        _check_alike(self.parts, lambda shape: shape)
        shape, axis = self.parts[0].shape, self.axis
        _set(self, _common(self.parts), (*shape[:axis], len(self.parts), *shape[axis:]))

    def read(self, bounds: Bounds) -> Array:
        inner = (*bounds[: self.axis], *bounds[self.axis + 1 :])
        chosen = self.parts[slice(*bounds[self.axis])]
        if len(chosen) == 1 and chosen[0].dtype is self.dtype:
            return np.expand_dims(chosen[0].read(inner), self.axis)
        out = _empty(bounds, self.dtype)
        for place, part in zip(np.moveaxis(out, self.axis, 0), chosen, strict=True):
            place[...] = part.read(inner)
        return out


@dataclass(frozen=True)
class Concat:
    """Arrays one after the other along an axis."""

    parts: tuple[Arrangement, ...]
    axis: int = 0
    dtype: DType = field(init=False)
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_axis(self.axis, len(self.parts[0].shape), self.parts[0])
        axis = self.axis
        _check_alike(self.parts, lambda shape: (*shape[:axis], *shape[axis + 1 :], len(shape)))
        shape, size = self.parts[0].shape, sum(p.shape[axis] for p in self.parts)
        _set(self, _common(self.parts), (*shape[:axis], size, *shape[axis + 1 :]))

    def read(self, bounds: Bounds) -> Array:
        out, (lo, hi), start = _empty(bounds, self.dtype), bounds[self.axis], 0
        for part in self.parts:
            count = part.shape[self.axis]
            first, last = max(lo - start, 0), min(hi - start, count)
            if first < last:
                found = part.read(_with(bounds, self.axis, (first, last)))
                to = (*((0, None),) * self.axis, (start + first - lo, start + last - lo))
                out[_index(to)] = found
            start += count
        return out


@dataclass(frozen=True)
class Slice:
    """lo..hi of an axis."""

    part: Arrangement
    axis: int
    lo: int
    hi: int
    dtype: DType = field(init=False)
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        _check_axis(self.axis, len(self.part.shape), self.part)
        size = self.part.shape[self.axis]
        if not 0 <= self.lo < self.hi <= size:
            raise Misfit(f"{self.lo}..{self.hi} of axis {self.axis} is to be cut out of {size}", self.part)
        shape = self.part.shape
        _set(self, self.part.dtype, (*shape[: self.axis], self.hi - self.lo, *shape[self.axis + 1 :]))

    def read(self, bounds: Bounds) -> Array:
        lo, hi = bounds[self.axis]
        return self.part.read(_with(bounds, self.axis, (self.lo + lo, self.lo + hi)))


@dataclass(frozen=True)
class Transpose:
    """Two axes swapped."""

    part: Arrangement
    first: int
    second: int
    dtype: DType = field(init=False)
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        for axis in (self.first, self.second):
            _check_axis(axis, len(self.part.shape), self.part)
        _set(self, self.part.dtype, self._swapped(self.part.shape))

    def read(self, bounds: Bounds) -> Array:
        return self.part.read(self._swapped(bounds)).swapaxes(self.first, self.second)

    def _swapped(self, each: tuple[Any, ...]) -> tuple[Any, ...]:
        found = list(each)
        found[self.first], found[self.second] = found[self.second], found[self.first]
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Take:
    """An axis in another order: at each index of it, which index of the part's is there."""

    part: Arrangement
    axis: int
    order: Array
    dtype: DType = field(init=False)
    shape: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        _set(self, self.part.dtype, self.part.shape)

    def read(self, bounds: Bounds) -> Array:
        wanted = self.order[slice(*bounds[self.axis])]
        if not len(wanted):
            return _empty(bounds, self.dtype)
        first, last = int(wanted.min()), int(wanted.max()) + 1
        return np.take(self.part.read(_with(bounds, self.axis, (first, last))), wanted - first, self.axis)


def entry(array: Arrangement, index: int) -> Arrangement | None:
    """The array at an index of the first axis, without that axis; None where it is a part of a stored one."""
    match array:
        case Stack(parts, 0):
            return parts[index]
        case Stack(parts, axis) | Concat(parts, axis) if axis > 0:
            found = [entry(p, index) for p in parts]
            kept = tuple(p for p in found if p is not None)
            return type(array)(kept, axis - 1) if len(kept) == len(found) else None
        case Slice(part, axis, lo, hi) if axis > 0 and (found := entry(part, index)) is not None:
            return Slice(found, axis - 1, lo, hi)
        case _:
            return None


@dataclass(frozen=True)
class Rows:
    """Rows lo..hi of a stored matrix."""

    name: str
    lo: int
    hi: int


def row_parts(array: Arrangement) -> list[Rows] | None:
    """The rows of an array [.., K], all axes but the last as one, as rows of stored matrices in order.

    None where it is not made of whole rows of stored matrices.
    """
    if len(array.shape) > 2:
        entries = [entry(array, i) for i in range(array.shape[0])]
        return _all([None if e is None else row_parts(e) for e in entries])
    match array:
        case Stored(_, name) if len(array.shape) == 2:
            return [Rows(name, 0, array.shape[0])]
        case Concat(parts, 0):
            return _all([row_parts(p) for p in parts])
        case Slice(part, 0, lo, hi) if (found := row_parts(part)) is not None:
            return _cut(found, lo, hi)
        case _:
            return None


def _all(each: Sequence[list[Rows] | None]) -> list[Rows] | None:
    return None if None in each else [rows for found in each if found is not None for rows in found]


def _cut(rows: Sequence[Rows], lo: int, hi: int) -> list[Rows]:
    found, start = list[Rows](), 0
    for each in rows:
        first, last = max(each.lo, each.lo + lo - start), min(each.hi, each.lo + hi - start)
        if first < last:
            found.append(Rows(each.name, first, last))
        start += each.hi - each.lo
    return found


def _common(parts: Sequence[Arrangement]) -> DType:
    """The type that holds all of them."""
    found = {p.dtype for p in parts}
    if len(found) == 1:
        return parts[0].dtype
    if found <= set(_EXACT_IN_F32):
        return DType.F32
    odd = next(p for p in parts if p.dtype is not parts[0].dtype)
    raise Misfit(f"it is stored as {odd.dtype}, and what belongs beside it as {parts[0].dtype}", odd)


def _check_alike(parts: Sequence[Arrangement], key: Callable[[tuple[int, ...]], object]) -> None:
    keys = [key(p.shape) for p in parts]
    for part, found in zip(parts, keys, strict=True):
        if found != keys[0]:
            shapes = f"{list(part.shape)}, and what belongs beside it {list(parts[0].shape)}"
            raise Misfit(f"it has the shape {shapes}", part)


def _check_axis(axis: int, rank: int, part: Arrangement) -> None:
    if not 0 <= axis < rank:
        raise Misfit(f"it has {len(part.shape)} axes, too few to be put together along axis {axis}", part)


def _with(bounds: Bounds, axis: int, found: tuple[int, int]) -> Bounds:
    return (*bounds[:axis], found, *bounds[axis + 1 :])


def _index(bounds: Sequence[tuple[int, int | None]]) -> tuple[slice, ...]:
    return tuple(slice(*b) for b in bounds)


def _empty(bounds: Bounds, dtype: DType) -> Array:
    return np.empty(tuple(hi - lo for lo, hi in bounds), dtype.numpy)


def _set(array: Arrangement, dtype: DType, shape: tuple[int, ...]) -> None:
    """The type and shape of a frozen arrangement that is being made."""
    object.__setattr__(array, "dtype", dtype)
    object.__setattr__(array, "shape", shape)
