"""What a score is: scale * dot, softcap, ALiBi bias, and the positions where it counts at all."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import sympy

from ir.dims import symbol
from ir.graph import Arg, Scalar, Value
from ir.predicates import KEY, QUERY
from passes.attention.arithmetic import VERY_LOW
from passes.attention.biases import table
from passes.attention.cases import Cases, Element, either
from passes.attention.elements import DISTANCES, HEAD, ROWS, TOKENS, Elements
from passes.attention.indexing import shape_of, terms_of
from passes.attention.proof import MaskRefused

LARGEST_BIAS = 1e4  # of what may be added to a score that counts
LOW_BESIDE_BIAS = -1e9  # ALiBi biases reach thousands on long contexts

Emit = Callable[..., Value]


@dataclass(frozen=True)
class Bias:
    """ALiBi: slope[h] * (k - q), the slope a constant plus multiples of per-head symbols."""

    constant: Any
    factors: tuple[tuple[Any, Any], ...]  # (per-head symbol, factor)

    def emit(self, elements: Elements, emit: Emit) -> Arg:
        """The slopes as one operand [H]."""
        heads = elements.sizes[HEAD]
        total: Value | None = None
        for head, factor in self.factors:
            part = cast(Value, elements.per_head[head])
            part = part if shape_of(part) == (heads,) else emit("reshape", part, shape=(heads,))
            part = part if factor == 1 else emit("mul", part, Scalar(float(factor)))
            total = part if total is None else emit("add", total, part)
        if total is None:
            return emit("full", shape=(heads,), value=float(self.constant), dtype="f32")
        return total if self.constant == 0 else emit("add", total, Scalar(float(self.constant)))


@dataclass(frozen=True)
class Scores:
    """dot: the symbol of query times key (None: an additive mask alone). keep: where a score counts.

    shifted: whether something is added to all scores of a query, which matters beside sinks.
    keyed: what is added that depends on the key's token and the head: (symbol, factor).
    distances: what is added that depends on the distance and the head: (symbol, factor).
    """

    dot: Any
    scale: Any
    softcap: Any
    bias: Bias | None
    keep: Any
    shifted: bool = False
    keyed: tuple[tuple[Any, Any], ...] = ()
    distances: tuple[tuple[Any, Any], ...] = ()

    def emit_bias(self, elements: Elements, emit: Emit) -> Arg:
        """What is added by distance as one operand: slopes [H], a table [H,N], or none."""
        slopes = None if self.bias is None else self.bias.emit(elements, emit)
        return table(elements, self.distances, slopes, emit) if self.distances else slopes


def read_scores(element: Element, has_dot: bool = True) -> Scores:
    """Take a score's cases apart. Raises MaskRefused on a form that attention does not have."""
    if not isinstance(element, Cases):  # a boolean mask
        return Scores(None, 1, 0, None, element)
    kept = [(leaf, guard) for leaf, guard in element.items if not _is_hidden(leaf)]
    if not kept:
        raise MaskRefused("the mask hides every key")
    forms = {sympy.expand(on_past_keys(leaf)) for leaf, _ in kept}
    if len(forms) > 1:
        shown = ", ".join(sorted(_show(f) for f in forms)[:4])
        raise MaskRefused(
            f"what is added to a score depends on positions and is neither a mask nor ALiBi: {shown}"
        )
    keep: Any = sympy.false
    for _, guard in kept:
        keep = either(keep, guard)
    form = forms.pop()
    relative = _without_row_terms(form)
    return replace(_read_leaf(relative, keep, has_dot), shifted=relative != form)


def _is_hidden(leaf: Any) -> bool:
    """A score so low that softmax gives it nothing, whatever the dot product (below 1e4 in size) is."""
    constant: Any = sympy.Integer(0)
    limit = VERY_LOW
    for term in terms_of(leaf):
        if not term.free_symbols:
            constant += term
        elif any(s.is_integer for s in term.free_symbols):
            limit = LOW_BESIDE_BIAS
            if not _is_small_bias(term):
                return False
    return bool(constant <= limit)


def _is_small_bias(term: Any) -> bool:
    """slope * position, the slope a weight of the head or at most 1."""
    factor, rest = term.as_coeff_Mul()
    return (
        rest in (QUERY, KEY) and abs(factor) <= 1 or any(s.name.startswith("head") for s in rest.free_symbols)
    )


def _without_row_terms(leaf: Any) -> Any:
    """The leaf without what is the same for all keys of a query, which softmax takes out again."""
    return sympy.Add(*(t for t in terms_of(leaf) if not _is_row_term(t)))


def on_past_keys(leaf: Any) -> Any:
    """The leaf with each maximum and minimum decided for k <= q: no later key may count anyway."""
    for choice in sorted(leaf.atoms(sympy.Max, sympy.Min), key=str):
        a, *others = choice.args
        difference = sympy.expand(a - others[0])  # n * (q - k) + m
        n = difference.coeff(QUERY)
        m = sympy.expand(difference - n * (QUERY - KEY))
        if len(others) > 1 or m.free_symbols or not n.is_Integer or n * m < 0:
            continue
        first_is_larger = n > 0 or m > 0
        leaf = leaf.xreplace({choice: a if first_is_larger == isinstance(choice, sympy.Max) else others[0]})
    return leaf


def _is_row_term(term: Any) -> bool:
    others = (TOKENS, DISTANCES)
    return all(_is_known(s) and s != KEY and not s.name.startswith(others) for s in term.free_symbols)


def _is_known(s: Any) -> bool:
    return bool(s.is_integer) or s.name.startswith(("head", TOKENS, ROWS, DISTANCES))


def _show(form: Any) -> str:
    text = re.sub(r"matmul\d+", "dot", str(form))
    return text if len(text) < 60 else f"{text[:57]}..."


def _read_leaf(leaf: Any, keep: Any, has_dot: bool) -> Scores:
    dots = [s for s in leaf.free_symbols if not _is_known(s)]
    if len(dots) != (1 if has_dot else 0):
        raise MaskRefused(f"a score is made of {len(dots)} products of queries and keys")
    core = [t for t in terms_of(leaf) if dots and dots[0] in t.free_symbols]
    rest, keyed = _split(TOKENS, sympy.expand(leaf - sympy.Add(*core)))
    rest, distances = _split(DISTANCES, rest)
    scale, softcap = _read_core(sympy.Add(*core), dots[0]) if dots else (sympy.Integer(1), sympy.Integer(0))
    dot, bias = dots[0] if dots else None, _read_bias(rest)
    return Scores(dot, scale, softcap, bias, keep, keyed=keyed, distances=distances)


def _split(kind: str, rest: Any) -> tuple[Any, tuple[tuple[Any, Any], ...]]:
    """What is added to a score, without what symbols of a kind make, and that. Raises MaskRefused."""
    found = [t for t in terms_of(rest) if any(s.name.startswith(kind) for s in t.free_symbols)]
    for term in found:
        factor, symbol = term.as_coeff_Mul()
        if not symbol.is_Symbol or not factor.is_finite:
            what = "bias of the key" if kind == TOKENS else "bias by distance"
            raise MaskRefused(f"a score has {_show(term)} added, which is neither a mask nor a {what}")
    factors = tuple((symbol, factor) for factor, symbol in (t.as_coeff_Mul() for t in found))
    return sympy.expand(rest - sympy.Add(*found)), factors


def _read_core(core: Any, dot: Any) -> tuple[Any, Any]:
    """(scale, softcap) of scale * dot or of c * tanh(scale * dot / c)."""
    caps = list(cast("set[Any]", core.atoms(sympy.tanh)))
    if not caps:
        scale = core / dot
        return _number(scale, "is scaled by"), sympy.Integer(0)
    cap = _number(core / caps[0], "is capped by")
    inner = _number(caps[0].args[0] / dot, "is scaled by")
    return inner * cap, cap


def _number(e: Any, what: str) -> Any:
    e = sympy.simplify(e) if e.free_symbols else e
    if e.free_symbols or not e.is_positive or not e.is_finite:
        raise MaskRefused(f"a score {what} {_show(e)}, which is not a positive constant")
    return e


def _read_bias(rest: Any) -> Bias | None:
    if rest == 0:
        return None
    slope = sympy.expand(rest.coeff(KEY, 1))
    heads = sorted((s for s in slope.free_symbols), key=str)
    factors = tuple((head, slope.coeff(head, 1)) for head in heads)
    constant = slope.subs({head: 0 for head in heads})
    again = sum((head * factor for head, factor in factors), constant) * KEY
    left = sympy.expand(rest - again)
    linear = all(not f.free_symbols for _, f in factors) and not constant.free_symbols
    if not linear or left != 0 or {QUERY, KEY, symbol("S")} & set(heads):
        raise MaskRefused(f"a score has {_show(rest)} added, which is neither a mask nor ALiBi")
    return Bias(constant, factors)
