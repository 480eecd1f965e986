"""A number that depends on positions, as a list of cases: `leaf` where `guard` holds.

A leaf is a sympy expression: an exact number, -oo, integers made from positions, or symbols that stand
for a score, a per-head weight and the like. Guards exclude each other and cover everything. A truth value
is a predicate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from math import isinf, isnan
from typing import Any

import sympy
from sympy.logic.boolalg import And, Boolean, Or

from passes.attention.proof import negation

MAX_CASES = 24


class CasesError(ValueError):
    """A value that cannot be followed."""


@dataclass(frozen=True)
class Cases:
    items: tuple[tuple[Any, Any], ...]  # (leaf, guard)

    @property
    def only(self) -> Any:
        """The leaf, if there is but one."""
        return self.items[0][0] if len(self.items) == 1 else None


Element = Any  # Cases, or a sympy Boolean


def gather(pairs: Iterable[tuple[Any, Any]]) -> Cases:
    """Cases from (leaf, guard) pairs; equal leaves are joined and impossible ones dropped."""
    found: dict[Any, Any] = {}
    for leaf, guard in pairs:
        if guard == sympy.false:
            continue
        if leaf is sympy.nan or leaf.has(sympy.zoo):
            raise CasesError("is not a number (infinity times zero, or a division by zero)")
        found[leaf] = either(found[leaf], guard) if leaf in found else guard
    if len(found) > MAX_CASES:
        raise CasesError(f"takes more than {MAX_CASES} different forms")
    return Cases(tuple(found.items()))


def number(value: bool | int | float) -> Element:
    """A literal, exactly."""
    if isinstance(value, bool):
        return sympy.true if value else sympy.false
    return always(exact(value))


def exact(value: int | float) -> Any:
    if isnan(value):
        raise CasesError("is not a number")
    if isinf(value):
        return sympy.oo if value > 0 else -sympy.oo
    return sympy.Rational(value)


def always(leaf: Any) -> Cases:
    return Cases(((sympy.sympify(leaf), sympy.true),))


def choose(condition: Any, x: Element, y: Element) -> Element:
    """x where the condition holds, else y."""
    otherwise = negation(condition)
    if not isinstance(x, Cases):
        return either(both(condition, x), both(otherwise, y))
    return gather(
        [
            *((leaf, both(condition, g)) for leaf, g in x.items),
            *((leaf, both(otherwise, g)) for leaf, g in y.items),
        ]
    )


def combine(fn: Callable[..., Any], *operands: Cases) -> Cases:
    """fn of every combination of leaves."""
    pairs: list[tuple[Any, Any]] = []
    for chosen in product(*(o.items for o in operands)):
        guard: Any = sympy.true
        for _, g in chosen:
            guard = both(guard, g)
        if guard != sympy.false:
            pairs.append((sympy.sympify(fn(*(leaf for leaf, _ in chosen))), guard))
    return gather(pairs)


def compare(fn: Callable[[Any, Any], Any], x: Cases, y: Cases) -> Boolean:
    """Where a comparison holds."""
    found: Any = sympy.false
    for (a, g), (b, h) in product(x.items, y.items):
        guard = both(g, h)
        if guard != sympy.false:
            found = either(found, both(guard, fn(a, b)))
    return found


def as_number(predicate: Any) -> Cases:
    """1 where it holds, else 0."""
    return gather([(sympy.Integer(1), predicate), (sympy.Integer(0), negation(predicate))])


def both(a: Any, b: Any) -> Any:
    """a and b; false if they are each other's opposite."""
    if a == sympy.true or a == b:
        return b
    return sympy.false if b not in (True, sympy.true) and negation(a) == b else And(a, b)


def either(a: Any, b: Any) -> Any:
    """a or b; true if they are each other's opposite."""
    if a == sympy.false or a == b:
        return b
    return sympy.true if b not in (False, sympy.false) and negation(a) == b else Or(a, b)
