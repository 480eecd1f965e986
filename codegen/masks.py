"""Mask predicates as kernels take them: a range of keys for each query, and the rest as a condition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import sympy
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Not, Or

from ir.dims import CeilDiv, FloorDiv, Table
from ir.predicates import KEY, QUERY, conjuncts, is_causal, window, window_of


@dataclass(frozen=True)
class KeyRange:
    """low(q) <= k < high(q) for all keys k that a query q sees; those of them that meet `rest` it does see.

    high: q + 1 if causal, else none. low: q - window + 1 or the start of q's chunk, the larger if both.
    """

    causal: bool
    window: int | None
    chunk: int | None
    rest: tuple[Any, ...]

    @property
    def has_low(self) -> bool:
        return self.window is not None or self.chunk is not None


def key_range(predicate: Any) -> KeyRange:
    causal, chunk = is_causal(predicate), _chunk_of(predicate)

    def is_said(term: Any) -> bool:
        in_range = causal and chunk is not None and _chunk_of(term) == chunk
        return term in (True, sympy.true) or in_range or _is_range(term)

    rest = tuple(term for term in conjuncts(predicate) if not is_said(term))
    return KeyRange(causal, window_of(predicate), chunk, rest)


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


@dataclass(frozen=True)
class Spelling:
    """How a target writes what predicates hold. Texts with {0} and {1} take spelled operands.

    symbols: names of the query's and the key's position. table: of a table's number, row and column.
    """

    target: str
    constants: dict[bool, str]
    symbols: dict[Any, str]
    integer: str
    table: Callable[[int, str, str], str]
    both: str
    either: str
    negation: str
    floor_quotient: str
    floor_rest: str
    smaller: str
    larger: str

    def spell(self, e: Any) -> str:
        """A condition, or a position in one. Raises ValueError for what has no spelling."""
        if e in (sympy.true, sympy.false) or isinstance(e, bool):
            return self.constants[bool(e)]
        if isinstance(e, sympy.Integer):
            return self.integer.format(int(e))
        if isinstance(e, sympy.Symbol):
            return self.symbols[e]
        args = [self.spell(a) for a in e.args]
        if isinstance(e, Table):
            return self.table(int(cast(Any, e.args[0])), args[1], args[2])
        if isinstance(e, Relational):
            return f"({args[0]} {e.rel_op} {args[1]})"
        if isinstance(e, sympy.Pow):
            return f"({' * '.join([args[0]] * int(cast(Any, e.args[1])))})"
        if isinstance(e, Not):
            return self.negation.format(args[0])
        if isinstance(e, CeilDiv):
            return f"(-{self.floor_quotient.format('-' + args[0], args[1])})"
        return self._spell_many(e, args)

    def _spell_many(self, e: Any, args: list[str]) -> str:
        """Of any number of operands."""
        operators = {And: self.both, Or: self.either, sympy.Add: " + ", sympy.Mul: " * "}
        for kind, operator in operators.items():
            if isinstance(e, kind):
                return f"({operator.join(args)})"
        functions = {FloorDiv: self.floor_quotient, sympy.Mod: self.floor_rest}
        functions |= {sympy.Min: self.smaller, sympy.Max: self.larger}
        for kind, function in functions.items():
            if isinstance(e, kind):
                text = args[0]
                for arg in args[1:]:
                    text = function.format(text, arg)
                return text
        raise ValueError(f"mask predicate holds {e}, which has no {self.target} spelling")
