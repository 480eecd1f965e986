"""Mask predicates as kernels take them: a range of keys for each query, and the rest as a condition."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import sympy
from sympy.logic.boolalg import And

from ir.dims import FloorDiv
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
