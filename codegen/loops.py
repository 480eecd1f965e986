"""Elementwise loops over operands that broadcast, whatever they are printed as."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar, cast

from ir.dims import Dim, product
from ir.types import Tensor

Stride = TypeVar("Stride", int, str)


class NoKernel(ValueError):
    """An op of the lowered graph that the target has no kernel for."""


def operand_strides(type_: Tensor, shape: Sequence[Dim], ld: Stride) -> tuple[Stride | int, tuple[int, ...]]:
    """Strides of an operand that broadcasts to `shape`, of its first axis and of the others; 0 where it does.

    ld: the stride of the operand's first axis, which is the loop's first where it has as many axes; where it
    has fewer, its rows are contiguous.
    """
    missing = len(shape) - type_.rank
    first: Stride | int = 0
    others: list[Dim] = [0] * missing
    for axis, dim in enumerate(type_.shape):
        others.append(0 if dim == 1 else product(type_.shape[axis + 1 :]))
    if type_.rank and not missing and type_.shape[0] != 1:
        first = ld
    if not all(isinstance(s, int) for s in others[1:]):
        raise NoKernel(f"an axis after the first has a symbolic size in {list(type_.shape)}")
    return first, cast("tuple[int, ...]", tuple(others[1:]))


def merged_axes(
    shape: Sequence[Dim], strides: Mapping[str, Sequence[int]]
) -> list[tuple[int, dict[str, int]]]:
    """Axes merged where every operand allows it, those of size 1 left out: (size, stride of each operand)."""
    axes: list[tuple[int, dict[str, int]]] = []
    for index, dim in enumerate(shape):
        if not isinstance(dim, int):
            raise NoKernel(f"an axis after the first has the symbolic size {dim}")
        if dim == 1:
            continue
        here = {name: own[index] for name, own in strides.items()}
        if axes and all(axes[-1][1][name] == here[name] * dim for name in strides):
            axes[-1] = (axes[-1][0] * dim, here)
        else:
            axes.append((dim, here))
    return axes
