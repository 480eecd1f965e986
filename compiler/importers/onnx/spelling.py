"""A formula as ops of the IR: ranges, arithmetic and comparisons, as a model would have written them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, BooleanAtom, Not, Or

from compiler.importers.refused import ImportRefused
from ir.dims import Dim, FloorDiv
from ir.graph import Scalar, Value, tensor_of
from ir.types import DType

Emit = Callable[..., Value]
Part = Value | Scalar

_RELATIONS = {
    sympy.Lt: "lt", sympy.Le: "le", sympy.Gt: "gt", sympy.Ge: "ge", sympy.Eq: "eq", sympy.Ne: "ne",
}  # fmt: skip
_FOLDED = {
    sympy.Add: "add", sympy.Mul: "mul", sympy.Max: "maximum", sympy.Min: "minimum", And: "and", Or: "or",
    FloorDiv: "floordiv", sympy.Mod: "mod",
}  # fmt: skip


class Spelling:
    """Of formulas of one shape and type."""

    def __init__(self, emit: Emit, shape: Sequence[Dim], dtype: DType) -> None:
        self.emit, self.shape, self.dtype = emit, tuple(shape), dtype

    def value(self, expr: Any) -> Value:
        """A tensor of the whole shape."""
        found = self.part(expr)
        if isinstance(found, Scalar):
            return self.emit("full", shape=self.shape, value=found.value, dtype=str(self.dtype))
        here = tensor_of(found).shape
        if len(here) < len(self.shape):
            found = self.emit("reshape", found, shape=(*(1,) * (len(self.shape) - len(here)), *here))
        return found if tensor_of(found).shape == self.shape else self.emit("expand", found, shape=self.shape)

    def part(self, expr: Any) -> Part:
        """A literal, or a tensor that broadcasts to the shape."""
        if isinstance(expr, BooleanAtom):
            return Scalar(bool(expr))
        if expr.is_Integer:
            return Scalar(int(expr))
        if expr.is_Symbol:
            return self._symbol(expr)
        if isinstance(expr, Not):
            return self.emit("not", self.tensor(expr.args[0]))
        if isinstance(expr, sympy.Piecewise):
            return self._cases(expr)
        if isinstance(expr, Relational) and expr.func in _RELATIONS:
            return self._pair(_RELATIONS[expr.func], *map(self.part, expr.args))
        if isinstance(expr, sympy.Pow) and expr.args[1].is_Integer:
            return reduce(lambda a, b: self._pair("mul", a, b), [self.part(expr.args[0])] * int(expr.args[1]))
        kind = next((kind for each, kind in _FOLDED.items() if isinstance(expr, each)), None)
        if kind is None:
            raise ImportRefused(f"{expr}, which is computed from positions, has no op")
        return reduce(lambda a, b: self._pair(kind, a, b), self._ordered(expr))

    def _ordered(self, expr: Any) -> list[Part]:
        """Operands, those with a minus last, and literals on the right."""
        parts = [self.part(a) for a in expr.args]
        if isinstance(expr, FloorDiv | sympy.Mod):
            return parts
        return sorted(parts, key=lambda p: isinstance(p, Scalar))

    def _symbol(self, expr: Any) -> Value:
        if expr.name == "S":
            return self.emit("dim", size=expr, dtype="i32")
        number = int(expr.name[1:])
        made = self.emit("iota", size=self.shape[number], dtype="i32")
        after = len(self.shape) - number - 1
        return self.emit("reshape", made, shape=(self.shape[number], *(1,) * after)) if after else made

    def _pair(self, kind: str, a: Part, b: Part) -> Value:
        if isinstance(a, Scalar) and isinstance(b, Scalar):
            a = self._full(a)
        return self.emit(kind, a, b)

    def _full(self, x: Scalar) -> Value:
        dtype = DType.BOOL if isinstance(x.value, bool) else DType.I32
        return self.emit("full", shape=(), value=x.value, dtype=str(dtype))

    def tensor(self, expr: Any) -> Value:
        found = self.part(expr)
        return self._full(found) if isinstance(found, Scalar) else found

    def _cases(self, expr: Any) -> Part:
        *others, (last, _) = expr.args
        found = self.part(last)
        for value, condition in reversed(others):
            x = self.part(value)
            x = self._full(x) if isinstance(x, Scalar) and isinstance(found, Scalar) else x
            found = self.emit("where", self.tensor(condition), x, found)
        return found
