"""Mask predicates as C++: a struct with the range that holds all that is seen, and the rest as a function."""

from __future__ import annotations

from typing import Any, cast

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Not, Or

from ir.dims import CeilDiv, FloorDiv, Table
from ir.predicates import KEY, QUERY, conjuncts, is_causal, window, window_of


def mask_struct(name: str, predicate: Any, table_columns: tuple[int, ...]) -> str:
    """A struct with low(q) <= k < high(q) for all keys k that q sees, and sees(q, k) where those are not all.

    table_columns: the row length of each boolean table.
    """
    terms = [t for t in conjuncts(predicate) if not _is_range(t)]
    size, chunk = window_of(predicate), _chunk_of(predicate)
    lows = [f"q - {size - 1}"] if size is not None else []
    lows += [f"q / {chunk} * {chunk}"] if chunk is not None else []
    low = f"maximum<int64_t>({', '.join(lows)})" if len(lows) == 2 else (lows or ["0"])[0]
    high = "q + 1" if is_causal(predicate) else "INT64_MAX / 2"
    sees = " && ".join(_print(t, table_columns) for t in terms) or "true"
    tables = "".join(f"  const uint8_t* table{i};\n" for i in range(len(table_columns)))
    return (
        f"struct {name} {{\n{tables}"
        f"  static constexpr bool GENERAL = {'true' if terms else 'false'};\n"
        f"  int64_t low([[maybe_unused]] int64_t q) const {{ return {low}; }}\n"
        f"  int64_t high([[maybe_unused]] int64_t q) const {{ return {high}; }}\n"
        f"  bool sees([[maybe_unused]] int64_t q, [[maybe_unused]] int64_t k) const {{ return {sees}; }}\n"
        "};\n"
    )


def _is_range(term: Any) -> bool:
    """Whether low and high say all that the term says."""
    if is_causal(term):
        return True
    size = window_of(term)
    return size is not None and window_of(And(term, window(size + 1))) == size


def _chunk_of(predicate: Any) -> int | None:
    """c if one of the terms is k // c == q // c."""
    for term in conjuncts(predicate):
        if isinstance(term, sympy.Eq):
            sides = [cast(Any, s) for s in (term.lhs, term.rhs)]
            if all(isinstance(s, FloorDiv) for s in sides) and {s.args[0] for s in sides} == {QUERY, KEY}:
                (divisor, *others) = {s.args[1] for s in sides}
                if not others and divisor.is_Integer:
                    return int(divisor)
    return None


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
