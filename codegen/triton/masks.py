"""Mask predicates in Triton: the keys that a query may see as a range, the rest as a condition.

Positions are i32 in ranges, and i64 in conditions, which may multiply them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from codegen.masks import KeyRange, Spelling, key_range
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
        return " & ".join(map(_spelling(self.columns).spell, self.keys.rest))


def _spelling(columns: tuple[int, ...]) -> Spelling:
    def table(index: int, row: str, column: str) -> str:
        place = f"{row} * {columns[index]} + {column} + 0 * (query + key)"
        return f"(tl.load(table{index} + ({place}), mask=seen, other=0) != 0)"

    return Spelling(
        target="Triton",
        constants={True: "(key == key)", False: "(key != key)"},
        symbols={QUERY: "query", KEY: "key"},
        integer="{0}",
        table=table,
        both=" & ",
        either=" | ",
        negation="({0} == 0)",
        floor_quotient="floor_quotient({0}, {1})",
        floor_rest="floor_rest({0}, {1})",
        smaller="tl.minimum({0}, {1})",
        larger="tl.maximum({0}, {1})",
    )
