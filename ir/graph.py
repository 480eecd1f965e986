"""The graph: SSA values, ops in order, no regions. All of it is immutable: a pass builds the next graph."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import sympy

from ir.dims import Bounds, Dim, free_names, normalize
from ir.types import Tensor, Type

Attr = Any  # bool | int | float | str | sympy expression | tuple of these
Attrs = Mapping[str, Attr]


@dataclass(frozen=True)
class Value:
    """A graph input or the result of one op. Its name is unique in the graph; text: `%name`."""

    name: str
    type: Type


@dataclass(frozen=True)
class Weight:
    """A constant array kept outside the graph, found by name; text: `@name: type`."""

    name: str
    type: Type


@dataclass(frozen=True)
class Scalar:
    """A literal operand; it takes the element type of the operands beside it."""

    value: bool | int | float

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scalar):
            return NotImplemented
        return type(self.value) is type(other.value) and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash(repr(self.value))


Arg = Value | Weight | Scalar | None  # None: an optional operand that is absent; text: `_`


def tensor_of(arg: Arg) -> Tensor:
    """The type of an operand or result that is known to be a tensor."""
    assert isinstance(arg, Value | Weight) and isinstance(arg.type, Tensor), f"{arg} is not a tensor"
    return arg.type


@dataclass(frozen=True)
class Op:
    """One operation. `loc` is the path of the module it came from and survives rewrites.

    Attributes are kept as their text reads back: lists are tuples, constant expressions numbers, and what is
    None is left out.
    """

    kind: str
    args: tuple[Arg, ...]
    attrs: Attrs
    outs: tuple[Value, ...]
    loc: str = ""

    @property
    def out(self) -> Value:
        """The only result."""
        (value,) = self.outs
        return value

    @property
    def values(self) -> Iterator[Value]:
        """The operands that are values of the graph."""
        return (a for a in self.args if isinstance(a, Value))

    def __post_init__(self) -> None:
        given = {name: canonical(value) for name, value in self.attrs.items() if value is not None}
        object.__setattr__(self, "attrs", given)

    def attr(self, name: str, default: Attr = None) -> Attr:
        return self.attrs.get(name, default)

    def with_attrs(self, **attrs: Attr) -> Op:
        return replace(self, attrs={**self.attrs, **attrs})

    def reading(self, now: Mapping[str, Arg]) -> Op:
        """The op on what stands for its operands now, by name; operands without an entry stay."""
        args = tuple(now.get(a.name, a) if isinstance(a, Value) else a for a in self.args)
        return self if args == self.args else replace(self, args=args)

    def renamed(self, names: Mapping[str, Value]) -> Op:
        """The op with operands and results called otherwise."""
        return replace(self.reading(names), outs=tuple(names.get(o.name, o) for o in self.outs))


def canonical(value: Any) -> Attr:
    """An attribute as its text reads back."""
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if value == value else math.nan  # the one NaN object: identical, so equal
    if isinstance(value, list | tuple):
        return tuple(canonical(item) for item in cast("tuple[Any, ...]", value))
    return normalize(value) if isinstance(value, sympy.Basic) else getattr(value, "item", lambda: value)()


@dataclass(frozen=True)
class Graph:
    """A program from inputs to outputs.

    dims: bounds of each symbol, (low, high or None). arena: sizes in bytes of the buffers that plan_memory
    laid out; an op's `at` attribute indexes them.
    """

    name: str
    dims: Mapping[str, Bounds]
    inputs: tuple[Value, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Value, ...]
    arena: tuple[Dim, ...] = field(default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "arena", tuple(normalize(size) for size in self.arena))

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every weight that an op reads, once, in order of first use."""
        seen = {a.name: a for op in self.ops for a in op.args if isinstance(a, Weight)}
        return tuple(seen.values())

    def producers(self) -> dict[str, Op]:
        """The op that makes each value, by value name; graph inputs have none."""
        return {out.name: op for op in self.ops for out in op.outs}

    def users(self) -> dict[str, list[Op]]:
        """The ops that read each value, by value name; graph outputs are not counted."""
        table: dict[str, list[Op]] = {}
        for op in self.ops:
            for value in dict.fromkeys(op.values):
                table.setdefault(value.name, []).append(op)
        return table

    def constants(self) -> frozenset[str]:
        """Names of values that depend on weights and literals alone: computed when weights are packed."""
        found: set[str] = set()
        for op in self.ops:
            shapes = (o.type.shape for o in op.outs if isinstance(o.type, Tensor))
            sized = any(free_names(a) for a in (*(d for shape in shapes for d in shape), *op.attrs.values()))
            if not sized and all(v.name in found for v in op.values):
                found.update(o.name for o in op.outs)
        return frozenset(found)

    def input(self, name: str) -> Value:
        for value in self.inputs:
            if value.name == name:
                return value
        raise KeyError(f"graph @{self.name} has no input %{name}")
