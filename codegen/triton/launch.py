"""Launches: which kernel runs on which operands over which grid, as plan.json says it (docs/artifact.md).

What depends on a step's sizes is an expression over T, R, Q and the tables' widths M0, M1, ...: an integer, a
name, or (operator, left, right).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from ir.dims import CeilDiv, Dim, FloorDiv

Expr = int | str | tuple[str, Any, Any]
Constant = bool | int | float | str


@dataclass(frozen=True)
class Arg:
    """One operand of a launch.

    place: how plan.json finds it. type: Triton's name of its type. aligned: divisible by 16 in every step.
    """

    place: tuple[tuple[str, Any], ...]
    type: str
    aligned: bool

    @property
    def json(self) -> dict[str, Any]:
        return dict(self.place)


@dataclass(frozen=True)
class Kernel:
    """A function with its constants and options: one binary.

    signature: (parameter, type). aligned: the parameters that are divisible by 16.
    """

    name: str
    function: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Constant], ...]
    aligned: tuple[str, ...]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Launch:
    """Nothing runs where one size of the grid is 0. grid: up to three sizes; x may be 2^31, y and z 2^16."""

    kernel: str
    grid: tuple[Expr, ...]
    args: tuple[Arg, ...]

    @property
    def json(self) -> dict[str, Any]:
        return {"kernel": self.kernel, "grid": list(self.grid), "args": [arg.json for arg in self.args]}


@dataclass(frozen=True)
class Case:
    """Launches for steps in which when[0] is at most when[1]; None: for all others."""

    launches: tuple[Launch, ...]
    when: tuple[Expr, int] | None = None

    @property
    def json(self) -> dict[str, Any]:
        return {
            "when": None if self.when is None else list(self.when),
            "launches": [x.json for x in self.launches],
        }


def always(*launches: Launch) -> list[Case]:
    return [Case(launches)]


def cdiv(size: Expr, step: int) -> Expr:
    """Tiles of `step` that cover a size."""
    if isinstance(size, int):
        return -(-size // step)
    return size if step == 1 else ("cdiv", size, step)


def times(a: Expr, b: Expr) -> Expr:
    if isinstance(a, int) and isinstance(b, int):
        return a * b
    if a == 1:
        return b
    return a if b == 1 else ("*", a, b)


def expression(dim: Dim) -> Expr:
    """A size. Raises ValueError for one that has no spelling."""
    value: Any = dim
    if isinstance(value, int | sympy.Integer):
        return int(value)
    if isinstance(value, sympy.Symbol):
        return str(value.name)
    for kind, operator in _OPERATORS.items():
        if isinstance(value, kind):
            found, *rest = [expression(a) for a in value.args]
            for arg in rest:
                found = (operator, found, arg)
            return found
    raise ValueError(f"size {dim} has no spelling in a launch")


_OPERATORS: dict[Any, str] = {sympy.Add: "+", sympy.Mul: "*", FloorDiv: "//", CeilDiv: "cdiv"}
