"""Scores of attention without a softmax: a product of query and key, times what decays between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from ir.graph import Arg, Op
from ir.predicates import CAUSAL, KEY, QUERY
from ir.rewrite import View
from passes.attention.cases import Cases
from passes.attention.elements import HEAD, Elements, Unreadable
from passes.attention.indexing import Index, broadcast, pull, unflatten
from passes.attention.matrices import Factors, NoMatrix, Weighting
from passes.attention.prover import Prover
from passes.attention.scores import on_past_keys
from passes.base import PassError
from passes.match import attribute, shape


class NotLinear(Exception):
    """The pattern began to match; why it does not."""


@dataclass(frozen=True)
class LinearScores:
    """scale * dot * exp(decay) for keys up to the query's, 0 for later ones.

    dot: the symbol of query times key; None for weights alone. rate: the decay over q - k, a number, or one
    times a head's symbol or its log; or the symbol of a running sum at the query, of which that at the key is
    taken; or a weighting by matrices of positions.
    """

    dot: Any
    scale: Any
    rate: Any
    lead: tuple[Any, ...]


def read_linear(
    prover: Prover, op: Op, scores: Arg, elements: Elements, lead: tuple[Any, ...], view: View
) -> LinearScores | None:
    """Scores [..,S,S], by a rate or else by matrices; None where they are no such product at all.

    lead: sizes of the axes before the query's. Raises NotLinear where the pattern began to match.
    """
    reason: NotLinear | None = None
    try:
        if (found := _by_rate(prover, op, scores, elements, lead, view)) is not None:
            return found
    except NotLinear as error:
        reason = error
    try:
        found = _by_matrices(prover, op, scores, elements, lead, view)
    except NotLinear as error:
        raise reason or error from None
    if found is None and reason is not None:
        raise reason
    return found


def _by_rate(
    prover: Prover, op: Op, scores: Arg, elements: Elements, lead: tuple[Any, ...], view: View
) -> LinearScores | None:
    """None where they are no masked product at all."""
    index = unflatten(HEAD, lead, elements.sizes)
    try:
        element = elements.at(scores, broadcast((*index, QUERY, KEY), shape(scores)))
    except Unreadable:
        return None
    if not isinstance(element, Cases):
        return None
    kept = [(leaf, guard) for leaf, guard in element.items if leaf != 0]
    dots = {s for leaf, _ in kept for s in leaf.free_symbols if _is_product(s, elements)}
    if len(dots) != 1:
        return None
    (dot,) = dots
    if len(kept) != 1:
        raise NotLinear("what scores are multiplied by depends on positions in other ways than a decay")
    ((leaf, keep),) = kept
    _check_causal(prover, op, keep, elements, view)
    factor = sympy.powsimp(sympy.expand(on_past_keys(leaf) / dot), combine="exp")
    scale, rest = factor.as_coeff_Mul()
    rate = sympy.Integer(0) if rest == 1 else _rate(rest, elements)
    return LinearScores(dot, scale, rate, index)


def _by_matrices(
    prover: Prover, op: Op, scores: Arg, elements: Elements, lead: tuple[Any, ...], view: View
) -> LinearScores | None:
    """Products that matrices of positions weight, or those alone. None where there are none of them."""
    index = unflatten(HEAD, lead, elements.sizes)
    try:
        element = (factors := Factors(elements)).at(scores, broadcast((*index, QUERY, KEY), shape(scores)))
    except Unreadable:
        return None
    kept = [(leaf, guard) for leaf, guard in element.items if leaf != 0] if isinstance(element, Cases) else []
    if len(kept) != 1:
        return None
    ((leaf, guard),) = kept
    scale, rest = leaf.as_coeff_Mul()
    powers = dict(rest.as_powers_dict())
    matrices = {s: powers[s] for s in powers if factors.is_matrix(s)}
    dots = [s for s in powers if s not in matrices and _is_product(s, elements)]
    if not matrices or len(dots) > 1 or len(dots) + len(matrices) < len(powers):
        return None
    if any(powers[s] != 1 for s in dots) or any(abs(n) != 1 for n in matrices.values()):
        return None
    terms = tuple((s, int(n)) for s, n in matrices.items())
    if lower := guard != sympy.true:
        _check_causal(prover, op, guard, elements, view)
    weighting = Weighting(elements, terms, float(scale), lower)
    try:
        weighting.check()
    except NoMatrix as error:
        raise NotLinear(str(error)) from None
    return LinearScores(dots[0] if dots else None, sympy.Integer(1), weighting, index)


def _check_causal(prover: Prover, op: Op, keep: Any, elements: Elements, view: View) -> None:
    """Raise NotLinear unless scores count for all keys up to the query and no others."""
    try:
        predicate, _ = prover.proved(op, keep, elements.sizes[QUERY], view)
    except PassError as refused:
        raise NotLinear(refused.reason) from None
    if predicate != CAUSAL:
        raise NotLinear(f"scores count where {predicate}, not for all keys up to the query")


def _is_product(symbol: Any, elements: Elements) -> bool:
    source = elements.opaque.get(symbol)
    return source is not None and source.op.kind == "matmul"


def _rate(factor: Any, elements: Elements) -> Any:
    """The rate of a decay. Raises NotLinear for any other factor."""
    if isinstance(factor, sympy.exp):
        exponent = sympy.expand(factor.args[0])
        rate = exponent.coeff(QUERY)
        others = [s for s in rate.free_symbols if s not in elements.per_head]
        if not others and sympy.expand(exponent - rate * (QUERY - KEY)) == 0:
            return rate
        for row in exponent.free_symbols & elements.opaque.keys():
            if exponent == row - _at_key(row, elements):
                return row
    if factor.is_Pow and factor.base in elements.per_head:
        times = factor.exp.coeff(QUERY)
        if times.is_number and sympy.expand(factor.exp - times * (QUERY - KEY)) == 0:
            return times * sympy.log(factor.base)
    raise NotLinear(f"scores are multiplied by {factor}, which is no decay with the distance")


def _at_key(row: Any, elements: Elements) -> Any:
    """The symbol of the running sum at the key that `row` is at the query; 0 where it is none."""
    op, index = origin(row, elements)
    if op.kind != "cumsum" or index[attribute(op, "axis")] != QUERY:
        return sympy.Integer(0)
    moved = (op, tuple(i.xreplace({QUERY: KEY}) for i in index))
    return next((s for s in elements.opaque if origin(s, elements) == moved), sympy.Integer(0))


def origin(symbol: Any, elements: Elements) -> tuple[Op, Index]:
    """What a symbol stands for, before ops that move elements."""
    source = elements.opaque[symbol]
    op, index = source.op, source.index
    while (moved := pull(op, op.outs[0].name, index, elements.sizes)) is not None:
        before = elements.producer(moved[0])
        if before is None or len(before.outs) > 1:
            break
        op, index = before, moved[1]
    return op, index
