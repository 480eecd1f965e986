"""Weights by name, wherever they are stored.

A `WeightSource` gives the *stored* element type and shape of each array and hands out rows without copying
where the file allows it. Whoever packs weights casts them to the type that the graph's `Weight` has
(`read_as`), a few rows at a time, so that a tensor need never be in memory twice.

Files are memory-mapped: their pages belong to the page cache and not to the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from compiler.errors import CompileError
from ir.dims import evaluate
from ir.graph import Graph, Weight
from ir.types import DType, Tensor

Array = np.ndarray[Any, np.dtype[Any]]

_NUMPY_TYPES = {dtype.numpy: dtype for dtype in DType if dtype.bits >= 8}
_CODES = (DType.I8, DType.U8, DType.F8E4M3)


class WeightError(CompileError, ValueError):
    """A weight is missing, malformed, or not of the shape that the model's configuration asks for."""


BELONG = "Get the config.json that belongs to these weights, or the weights that belong to it"


class WeightSource(Protocol):
    """Arrays by name. Raises WeightError, naming file and array, where one is missing or malformed."""

    @property
    def names(self) -> tuple[str, ...]: ...

    def type(self, name: str) -> Tensor:
        """The stored element type and shape."""
        ...

    def rows(self, name: str, lo: int, hi: int) -> Array:
        """Rows lo..hi of the first axis in the stored element type: a read-only view where possible."""
        ...

    def read(self, name: str) -> Array:
        """The whole array."""
        ...


class ArraySource:
    """Arrays that are in memory."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        self._arrays = dict(arrays)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._arrays)

    def type(self, name: str) -> Tensor:
        array = self.read(name)
        return Tensor(_NUMPY_TYPES[array.dtype], array.shape)

    def rows(self, name: str, lo: int, hi: int) -> Array:
        return self.read(name)[lo:hi]

    def read(self, name: str) -> Array:
        if name not in self._arrays:
            raise WeightError(f"there is no array {name!r}", where="weights", todo=BELONG)
        return self._arrays[name]


class ShapeSource:
    """Arrays of which nothing but type and shape is known."""

    def __init__(self, types: Mapping[str, Tensor]) -> None:
        self._types = dict(types)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._types)

    def type(self, name: str) -> Tensor:
        return self._types[name]

    def rows(self, name: str, lo: int, hi: int) -> Array:
        return self.read(name)

    def read(self, name: str) -> Array:
        raise WeightError(
            "the model cannot be compiled from shapes alone: how it computes depends on this tensor's values",
            where=f"tensor {name!r}",
            todo="Compile the checkpoint without --no-weights",
        )


class LayeredSource:
    """Several sources as one: the first that holds a name answers. renames: from a name to the stored one."""

    def __init__(self, sources: Iterable[WeightSource], renames: Mapping[str, str] | None = None) -> None:
        self._renames = dict(renames or {})
        self._owner: dict[str, WeightSource] = {}
        for source in reversed(tuple(sources)):
            self._owner.update(dict.fromkeys(source.names, source))

    @property
    def names(self) -> tuple[str, ...]:
        hidden = set(self._renames.values())
        return (*self._renames, *(n for n in self._owner if n not in self._renames and n not in hidden))

    def _find(self, name: str) -> tuple[WeightSource, str]:
        stored = self._renames.get(name, name)
        if stored not in self._owner:
            alias = "" if stored == name else f" (stored as {stored!r})"
            raise WeightError(f"there is no tensor {name!r}{alias}", where="checkpoint", todo=BELONG)
        return self._owner[stored], stored

    def type(self, name: str) -> Tensor:
        source, stored = self._find(name)
        return source.type(stored)

    def rows(self, name: str, lo: int, hi: int) -> Array:
        source, stored = self._find(name)
        return source.rows(stored, lo, hi)

    def read(self, name: str) -> Array:
        source, stored = self._find(name)
        return source.read(stored)


def read_as(source: WeightSource, weight: Weight, chunk_rows: int = 1024) -> Array:
    """The array that a graph's weight stands for, in the weight's own element type."""
    want = _tensor(weight)
    found = source.type(weight.name)
    if found.dtype is want.dtype or not found.shape:
        return source.read(weight.name).astype(want.dtype.numpy, copy=False)
    total, *inner = (evaluate(d, {}) for d in found.shape)
    out = np.empty((total, *inner), want.dtype.numpy)
    step = max(1, chunk_rows // math.prod(inner[:-1])) if total and all(inner) else 1
    for lo in range(0, total, step):
        out[lo : lo + step] = source.rows(weight.name, lo, min(lo + step, total))
    return out


def check_weights(graph: Graph, source: WeightSource, where: str = "checkpoint") -> None:
    """Every weight that the graph reads is there, with the graph's shape. Raises WeightError naming some.

    where: the checkpoint's path.
    """
    held = set(source.names)
    missing = [w.name for w in graph.weights if w.name not in held]
    if missing:
        some = ", ".join([*missing[:5], *(["..."] if missing[5:] else [])])
        what = f"{len(missing)} of the model's tensors are not in the checkpoint: {some}"
        raise WeightError(what, where=where, todo=BELONG)
    for weight in graph.weights:
        want, found = _tensor(weight), source.type(weight.name)
        if want.shape != found.shape:
            raise WeightError(
                f"it has shape {list(found.shape)} but the configuration makes it {list(want.shape)}",
                where=f"{where}, tensor {weight.name!r}",
                todo=BELONG,
            )
        if want.dtype.is_float and found.dtype in _CODES:
            raise WeightError(
                f"it is stored as {found.dtype}, codes without what scales them",
                where=f"{where}, tensor {weight.name!r}",
                todo="Get the config.json that says how they are quantised (quantization_config)",
            )


def _tensor(weight: Weight) -> Tensor:
    if not isinstance(weight.type, Tensor):
        raise WeightError("a weight must be a tensor", where=f"weight @{weight.name}", todo=BELONG)
    return weight.type
