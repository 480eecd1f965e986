"""Mask predicates as C++: a struct with the range that holds all that is seen, and the rest as a function."""

from __future__ import annotations

from typing import Any

from codegen.masks import Spelling, key_range
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
    spelling = _spelling(table_columns)
    sees = " && ".join(map(spelling.spell, keys.rest)) or "true"
    tables = "".join(f"  const uint8_t* table{i};\n" for i in range(len(table_columns)))
    return (
        f"struct {name} {{\n{tables}"
        f"  static constexpr bool GENERAL = {'true' if keys.rest else 'false'};\n"
        f"  int64_t low([[maybe_unused]] int64_t q) const {{ return {low}; }}\n"
        f"  int64_t high([[maybe_unused]] int64_t q) const {{ return {high}; }}\n"
        f"  bool sees([[maybe_unused]] int64_t q, [[maybe_unused]] int64_t k) const {{ return {sees}; }}\n"
        "};\n"
    )


def _spelling(columns: tuple[int, ...]) -> Spelling:
    return Spelling(
        target="C++",
        constants={True: "true", False: "false"},
        symbols={QUERY: "q", KEY: "k"},
        integer="int64_t({0})",
        table=lambda index, row, column: f"(table{index}[({row}) * {columns[index]} + ({column})] != 0)",
        both=" && ",
        either=" || ",
        negation="(!{0})",
        floor_quotient="floordiv<int64_t>({0}, {1})",
        floor_rest="mod<int64_t>({0}, {1})",
        smaller="minimum<int64_t>({0}, {1})",
        larger="maximum<int64_t>({0}, {1})",
    )
