"""Mask predicates in Triton: the keys that a query may see as a range, the rest as a condition.

Positions are i32 in ranges, and i64 in conditions, which may multiply them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Not, Or

from codegen.masks import KeyRange, key_range
from ir.dims import CeilDiv, FloorDiv, Table
from ir.predicates import KEY, QUERY

MOST = 1 << 30  # no position is as large


@dataclass(frozen=True)
class Mask:
    """What templates of attention ask of a mask. columns: the row length of each boolean table."""

    keys: KeyRange
    columns: tuple[int, ...]

    @staticmethod
    def of(predicate: Any, columns: tuple[int, ...]) -> Mask:
        return Mask(key_range(predicate), columns)

    @property
    def has_low(self) -> bool:
        return self.keys.has_low

    @property
    def causal(self) -> bool:
        return self.keys.causal

    @property
    def is_range(self) -> bool:
        """Whether a query sees all keys of its range."""
        return not self.keys.rest

    def low(self, query: str) -> str:
        """The first key of a query's range; never decreases from one query to the next."""
        window, chunk = self.keys.window, self.keys.chunk
        found = "0"
        if chunk is not None:
            found = f"{query} // {min(chunk, MOST)} * {min(chunk, MOST)}"
        if window is not None:
            found = f"tl.maximum({query} - {min(window, MOST) - 1}, {found})"
        return found

    def high(self, query: str, length: str) -> str:
        """One more than the last key of a query's range."""
        return f"{query} + 1" if self.causal else length

    @property
    def condition(self) -> str:
        """Over `query`, `key` (i64, [rows, keys]), and `seen`, where tables may be read."""
        return " & ".join(_print(term, self.columns) for term in self.keys.rest)


def _print(e: Any, columns: tuple[int, ...]) -> str:
    if e in (sympy.true, sympy.false) or isinstance(e, bool):
        return "(key == key)" if e else "(key != key)"
    if isinstance(e, sympy.Integer):
        return str(int(e))
    if isinstance(e, sympy.Symbol):
        return {QUERY: "query", KEY: "key"}[e]
    args = [_print(a, columns) for a in e.args]
    if isinstance(e, Table):
        index = int(cast(Any, e.args[0]))
        place = f"{args[1]} * {columns[index]} + {args[2]} + 0 * (query + key)"
        return f"(tl.load(table{index} + ({place}), mask=seen, other=0) != 0)"
    if isinstance(e, Relational):
        return f"({args[0]} {e.rel_op} {args[1]})"
    if isinstance(e, sympy.Pow):
        return f"({' * '.join([args[0]] * int(cast(Any, e.args[1])))})"
    for kind, spelled in _OPERATORS.items():
        if isinstance(e, kind):
            return f"({spelled.join(args)})"
    for kind, function in _FUNCTIONS.items():
        if isinstance(e, kind):
            text = args[0]
            for arg in args[1:]:
                text = f"{function}({text}, {arg})"
            return text
    if isinstance(e, Not):
        return f"({args[0]} == 0)"
    if isinstance(e, CeilDiv):
        return f"(-floor_quotient(-{args[0]}, {args[1]}))"
    raise ValueError(f"mask predicate holds {e}, which has no Triton spelling")


_OPERATORS: dict[Any, str] = {And: " & ", Or: " | ", sympy.Add: " + ", sympy.Mul: " * "}
_FUNCTIONS: dict[Any, str] = {
    FloorDiv: "floor_quotient",
    sympy.Mod: "floor_rest",
    sympy.Min: "tl.minimum",
    sympy.Max: "tl.maximum",
}
