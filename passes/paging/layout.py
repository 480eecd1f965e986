"""Where the tokens are in a value of the imported form, and how the paged form lays the same value out.

An imported value that depends on the tokens has one axis of size S. Its paged layout is [T, rest]: the token
axis first, then the other axes in their order, without a leading axis of size 1 (the batch). The rule depends
on the shape alone, so anyone can compare the two forms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ir.dims import Dim, free_names, symbol
from ir.ops.shape import same_size

S, T, R, Q = (symbol(name) for name in "STRQ")  # docs/ir.md says what the letters count
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Layout:
    """The token axis of an imported shape and the axes that stay beside it, in order."""

    shape: tuple[Dim, ...]
    token: int

    @property
    def kept(self) -> tuple[int, ...]:
        batch = 0 if self.token != 0 and self.shape[0] == 1 else None
        return tuple(i for i in range(len(self.shape)) if i not in (self.token, batch))

    @property
    def from_right(self) -> int:
        """How many axes from the right the tokens are: 1 is the last axis."""
        return len(self.shape) - self.token

    @property
    def paged(self) -> tuple[Dim, ...]:
        """The paged shape: [T, the kept axes]."""
        return self.only(self.kept)

    def only(self, axes: Sequence[int]) -> tuple[Dim, ...]:
        """[T, these axes]."""
        return (T, *(self.shape[i] for i in axes))

    def position(self, axis: int) -> int | None:
        """Where an imported axis is in the paged shape; None if it is not there."""
        if axis == self.token:
            return 0
        return self.kept.index(axis) + 1 if axis in self.kept else None


def token_axes(shape: Sequence[Dim]) -> tuple[int, ...]:
    """The axes whose size depends on S."""
    return tuple(i for i, d in enumerate(shape) if "S" in free_names(d))


def layout_of(shape: tuple[Dim, ...]) -> Layout | None:
    """The layout of a shape with exactly one axis of size S; None for any other."""
    axes = token_axes(shape)
    return Layout(shape, axes[0]) if len(axes) == 1 and shape[axes[0]] == S else None


def reshaped(before: Layout, shape: tuple[Dim, ...]) -> Layout | None:
    """The layout after a reshape that keeps the token axis whole; None where it does not."""
    after = layout_of(shape)
    if after is None:
        return None
    whole = same_size((1, *before.shape[: before.token]), (1, *shape[: after.token]))
    return after if whole else None


def to_tokens(array: Array, layout: Layout) -> Array:
    """An imported value's array (batch 1) in the paged layout."""
    moved = np.moveaxis(array, layout.token, 0)
    return moved.reshape(array.shape[layout.token], *(array.shape[i] for i in layout.kept))


__all__ = ["Q", "R", "S", "T", "Layout", "layout_of", "reshaped", "to_tokens", "token_axes"]
