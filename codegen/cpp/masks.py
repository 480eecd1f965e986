"""Mask predicates as C++: a struct with the range that holds all that is seen, and the rest as a function."""

from __future__ import annotations

from typing import Any, cast

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Not, Or

from codegen.masks import key_range
from ir.dims import CeilDiv, FloorDiv, Table
from ir.predicates import KEY, QUERY


def mask_struct(name: str, predicate: Any, table_columns: tuple[int, ...]) -> str:
    """A struct with low(q) <= k < high(q) for all keys k that q sees, and sees(q, k) where those are not all.

    table_columns: the row length of each boolean table.
    """
    keys = key_range(predicate)
    lows = [f"q - {keys.window - 1}"] if keys.window is not None else []
    lows += [f"q / {keys.chunk} * {keys.chunk}"] if keys.chunk is not None else []
    low = f"maximum<int64_t>({', '.join(lows)})" if len(lows) == 2 else (lows or ["0"])[0]
    high = "q + 1" if keys.causal else "INT64_MAX / 2"
    sees = " && ".join(_print(t, table_columns) for t in keys.rest) or "true"
    tables = "".join(f"  const uint8_t* table{i};\n" for i in range(len(table_columns)))
    return (
        f"struct {name} {{\n{tables}"
        f"  static constexpr bool GENERAL = {'true' if keys.rest else 'false'};\n"
        f"  int64_t low([[maybe_unused]] int64_t q) const {{ return {low}; }}\n"
        f"  int64_t high([[maybe_unused]] int64_t q) const {{ return {high}; }}\n"
        f"  bool sees([[maybe_unused]] int64_t q, [[maybe_unused]] int64_t k) const {{ return {sees}; }}\n"
        "};\n"
    )


def _print(e: Any, columns: tuple[int, ...]) -> str:
    if e in (sympy.true, sympy.false) or isinstance(e, bool):
        return "true" if e else "false"
    if isinstance(e, sympy.Integer):
        return f"int64_t({int(e)})"
    if isinstance(e, sympy.Symbol):
        return {QUERY: "q", KEY: "k"}[e]
    args = [_print(a, columns) for a in e.args]
    if isinstance(e, Table):
        index = int(cast(Any, e.args[0]))
        return f"(table{index}[({args[1]}) * {columns[index]} + ({args[2]})] != 0)"
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
                text = f"{function}<int64_t>({text}, {arg})"
            return text
    if isinstance(e, Not):
        return f"(!{args[0]})"
    if isinstance(e, CeilDiv):
        return f"(-floordiv<int64_t>(-{args[0]}, {args[1]}))"
    raise ValueError(f"mask predicate holds {e}, which has no C++ spelling")


_OPERATORS: dict[Any, str] = {And: " && ", Or: " || ", sympy.Add: " + ", sympy.Mul: " * "}
_FUNCTIONS: dict[Any, str] = {
    FloorDiv: "floordiv",
    sympy.Mod: "mod",
    sympy.Min: "minimum",
    sympy.Max: "maximum",
}
