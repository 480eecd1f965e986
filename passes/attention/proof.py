"""The mask proof: a predicate shows no query a later key and every query some key, or it is refused.

Simple forms (causal, window, chunk) are decided symbolically. Anything else is evaluated for every pair of
positions below the context, so that each constant in it is straddled: on small sizes a window of 4,096
looks causal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import sympy
import sympy.logic.boolalg as boolalg
from sympy.core.relational import Relational
from sympy.logic.boolalg import And, Not, Or

from ir.dims import FloorDiv, Table
from ir.predicates import (
    CAUSAL,
    KEY,
    QUERY,
    Grid,
    conjuncts,
    evaluate_grid,
    is_causal,
    why_not,
    window,
    window_of,
)

MAX_PAIRS = 2**28  # of positions that are tried one by one
PAIRS_AT_ONCE = 2**21
LOWER = "lower the context with --max-context"
ALONE = "compute the mask from positions and constants alone, the same for all heads"


class MaskRefused(ValueError):
    """A mask cannot be lowered soundly: why, and what to do next."""

    def __init__(self, reason: str, hint: str = "") -> None:
        self.reason, self.hint = reason, hint
        super().__init__(f"{reason}{f'; {hint}' if hint else ''}")


def chunk(size: int) -> Any:
    """Keys in the query's own chunk of `size` positions."""
    return sympy.Eq(FloorDiv(KEY, size), FloorDiv(QUERY, size))


def prove(predicate: Any, context: int | None, tables: Sequence[Grid] = ()) -> Any:
    """The predicate's simplest form that says the same for all positions below the context; CAUSAL is a term.

    tables: the arrays that its `Table`s read. context: the largest length, None if unbounded.
    Raises MaskRefused where it looks ahead, hides every key from some query, or cannot be decided.
    """
    tidied = tidy(predicate)
    _check_language(tidied, len(tables))
    terms = conjuncts(tidied)
    if is_causal(tidied) and all(_is_simple(t) for t in terms):
        return _join(t for t in terms if not _is_void(t, context))
    if context is None:
        raise MaskRefused(f"the mask {tidied} can only be tried out, and the context is unbounded", LOWER)
    _check_tables(tidied, context, tables)
    if context**2 > MAX_PAIRS:
        return _prove_diagonal(terms, context, tables)
    return _Scan(terms, context, tables).run()


def how_proved(predicate: Any, context: int | None) -> str:
    """What `prove` did to decide a predicate that it did not refuse."""
    terms = conjuncts(tidy(predicate))
    void = [t for t in terms if _is_void(t, context)]
    if not (is_causal(And(*terms)) and all(_is_simple(t) for t in terms)):
        pairs = f"every pair of positions below {context}"
        if context is not None and context**2 > MAX_PAIRS:
            pairs = f"a causal term, and every query's own key below {context}"
        return f"tried out on {pairs}"
    sizes = ", ".join(
        f"{'window' if window_of(t) else 'chunk'} of {window_of(t) or chunk_of(t)}" for t in void
    )
    return "decided symbolically" + (f"; its {sizes} hides nothing within {context}" if void else "")


def tidy(predicate: Any) -> Any:
    """Negations at the atoms, terms that all alternatives share taken out, one way to compare q and k."""
    return _factor(_spell(_nnf(predicate)))


def negation(predicate: Any) -> Any:
    return _nnf(Not(predicate))


def _nnf(predicate: Any) -> Any:
    """Negations at the atoms. To sympy a table read at an expression is none, so a symbol stands for each."""
    predicate = sympy.sympify(predicate)
    names = {table: sympy.Dummy() for table in cast("set[Any]", predicate.atoms(Table))}
    found = cast(Any, boolalg).to_nnf(predicate.xreplace(names), simplify=False)
    return found.xreplace({name: table for table, name in names.items()})


def _spell(e: Any) -> Any:
    if isinstance(e, And | Or):
        return e.func(*(_spell(a) for a in e.args))
    if not isinstance(e, Relational):
        return e
    if (size := window_of(e)) is not None:
        return window(size)
    if (ahead := window_of(e.xreplace({QUERY: KEY, KEY: QUERY}))) is not None:
        return CAUSAL if ahead == 1 else (KEY - QUERY) < ahead
    if (size := chunk_of(e)) is not None:
        return chunk(size)
    if isinstance(e, sympy.Eq) and set(e.args) == {QUERY, KEY}:
        return sympy.Eq(KEY, QUERY)
    return e


def _factor(e: Any) -> Any:
    """(a & b) | (a & c) -> a & (b | c), at every level."""
    if isinstance(e, And):
        return And(*(_factor(a) for a in e.args))
    if not isinstance(e, Or):
        return e
    choices = [conjuncts(_factor(a)) for a in e.args]
    shared = [t for t in choices[0] if all(t in c for c in choices)]
    rest = Or(*(And(*(t for t in c if t not in shared)) for c in choices))
    return And(*shared, rest)


def chunk_of(term: Any) -> int | None:
    """C if the term is q // C == k // C."""
    if not isinstance(term, sympy.Eq):
        return None
    sides: list[Any] = list(term.args)
    if not all(isinstance(s, FloorDiv) and isinstance(s.args[1], sympy.Integer) for s in sides):
        return None
    same = sides[0].args[1] == sides[1].args[1] and {s.args[0] for s in sides} == {QUERY, KEY}
    return int(sides[0].args[1]) if same else None


def _is_simple(term: Any) -> bool:
    """Whether it is causal, a window or a chunk, all of which show a query itself."""
    return is_causal(term) or (window_of(term) or 0) >= 1 or chunk_of(term) is not None


def _is_void(term: Any, context: int | None) -> bool:
    """A window or chunk that no two positions below the context get out of."""
    size = window_of(term) or chunk_of(term)
    return context is not None and size is not None and size >= context


def _join(terms: Iterable[Any]) -> Any:
    """CAUSAL and the terms, of several windows the smallest."""
    found = [t for t in terms if not is_causal(t)]
    sizes = [s for s in (window_of(t) for t in found) if s is not None]
    rest = [t for t in found if window_of(t) is None]
    return And(CAUSAL, *([window(min(sizes))] if sizes else []), *rest)


def _check_language(predicate: Any, num_tables: int) -> None:
    for s in cast("set[Any]", predicate.free_symbols) - {QUERY, KEY}:
        if s.name == "h":
            raise MaskRefused("the mask differs from head to head", ALONE)
        raise MaskRefused(f"the mask depends on {s}, not on positions alone: {predicate}", ALONE)
    if (reason := why_not(predicate, num_tables)) is not None:
        raise MaskRefused(reason)


def _check_tables(predicate: Any, context: int, tables: Sequence[Grid]) -> None:
    """Every table is at least as large as the context where it is read at a position itself."""
    for entry in _tables_in(predicate):
        array = tables[int(entry.args[0])]
        for index, size in zip(entry.args[1:], array.shape, strict=True):
            if index in (QUERY, KEY) and size < context:
                raise MaskRefused(
                    f"the mask is a table of {size} positions, and the context is {context}",
                    f"compile with --max-context {size}",
                )


def _tables_in(predicate: Any) -> list[Any]:
    return sorted(cast("set[Any]", predicate.atoms(Table)), key=str)


def _prove_diagonal(terms: Sequence[Any], context: int, tables: Sequence[Grid]) -> Any:
    """For contexts too large to try every pair: one term is causal, and every query sees itself."""
    predicate = And(*terms)
    if not is_causal(predicate):
        raise MaskRefused(f"too many positions to show that {predicate} never looks ahead", LOWER)
    positions = np.arange(context)
    if any(set(entry.args[1:]) - {QUERY, KEY} for entry in _tables_in(predicate)):
        raise MaskRefused(f"too many positions to try where {predicate} reads its tables", LOWER)
    if not np.all(evaluate_grid(predicate, positions, positions, tables)):
        raise MaskRefused(f"too many positions to show that each query sees a key under {predicate}", LOWER)
    return _join(t for t in terms if not _is_void(t, context))


@dataclass
class _Scan:
    """One pass over all pairs of positions, a block of queries at a time."""

    terms: Sequence[Any]
    context: int
    tables: Sequence[Grid]

    def run(self) -> Any:
        forms = self._forms()
        idle = [True] * len(self.terms)  # terms that hide nothing of what is not after the query
        step = max(1, PAIRS_AT_ONCE // self.context)
        for start in range(0, self.context, step):
            q = np.arange(start, min(start + step, self.context))[:, None]
            k = np.arange(self.context)[None, :]
            parts = [self._grid(t, q, k) for t in self.terms]
            seen, later = np.logical_and.reduce(parts), k > q
            self._check(seen, later, start)
            idle = [i and bool(np.all(p | later)) for i, p in zip(idle, parts, strict=True)]
            forms = [f for f in forms if np.array_equal(self._grid(f, q, k), seen)]
        return forms[0] if forms else _join(t for t, i in zip(self.terms, idle, strict=True) if not i)

    def _grid(self, predicate: Any, q: Grid, k: Grid) -> Grid:
        for entry in _tables_in(predicate):
            self._check_index(entry, q, k)
        shape = (q.shape[0], k.shape[1])
        return np.broadcast_to(np.asarray(evaluate_grid(predicate, q, k, self.tables)), shape)

    def _check_index(self, entry: Any, q: Grid, k: Grid) -> None:
        for index, size in zip(entry.args[1:], self.tables[int(entry.args[0])].shape, strict=True):
            at = np.asarray(evaluate_grid(index, q, k, self.tables))
            if at.min() < 0 or at.max() >= size:
                raise MaskRefused(f"the mask reads a table of {size} at {index}, which is outside it", LOWER)

    def _check(self, seen: Grid, later: Grid, start: int) -> None:
        if np.any(ahead := seen & later):
            row, key = (int(i) for i in np.argwhere(ahead)[0])
            raise MaskRefused(
                f"the mask looks ahead: the query at position {start + row} sees the key at {key}",
                "let no query see a later key; models that read both ways (encoders) cannot be compiled",
            )
        if not np.all(some := seen.any(axis=1)):
            query = start + int(np.argmin(some))
            raise MaskRefused(
                f"the mask shows the query at position {query} no key: its softmax is undefined",
                "let every query see itself",
            )

    def _forms(self) -> list[Any]:
        """Simple predicates that may say the same: sizes are read off the last row and the first column."""
        n = self.context
        line = np.arange(n)
        predicate = And(*self.terms)
        last = self._grid(predicate, np.full((1, 1), n - 1), line[None, :])
        first = self._grid(predicate, line[:, None], np.zeros((1, 1), np.int64))
        width = int(last.sum())
        gap = int(np.argmin(first)) if not np.all(first) else n
        return [CAUSAL, And(CAUSAL, window(max(width, 1))), And(CAUSAL, chunk(max(gap, 1)))]
