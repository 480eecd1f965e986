"""An attention op, before or after paging, in words."""

from __future__ import annotations

from typing import Any

import sympy

from compiler.explanation.facts import Attention
from ir.graph import Op, tensor_of
from ir.ops import OPS
from ir.predicates import KEY, QUERY, conjuncts, is_causal, window_of
from ir.text import print_attr
from ir.types import KV
from passes.attention.proof import chunk_of
from passes.match import attribute, operand

NOT_PROVED = "an operand, not proved yet"


def attention_of(op: Op, groups: dict[str, int], proofs: dict[str, str]) -> Attention:
    """groups: the group of each KV state. proofs: how masks were proved. Both by a value's name."""
    state: Any = getattr(op.args[1], "type", None)
    paged = isinstance(state, KV)
    query_heads, kv_heads, head_size, value_size = _paged_sizes(op, state) if paged else _sizes(op)
    sinks, bias = (operand(op, OPS[op.kind].operands.index(f"{n}?")) for n in ("sinks", "bias"))
    by_distance = bias is not None and len(tensor_of(bias).shape) == 2
    mask = op.attr("mask")
    return Attention(
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_size=head_size,
        value_size=value_size,
        scale=float(attribute(op, "scale")),
        softcap=float(attribute(op, "softcap")),
        sinks=sinks is not None,
        alibi=bias is not None and not by_distance,
        by_distance=by_distance,
        mask=NOT_PROVED if mask is None else mask_in_words(mask),
        window=window_of(mask),
        back=None if mask is None else back_of(mask),
        proof=proofs.get(op.outs[0].name, ""),
        group=groups.get(getattr(op.args[1], "name", "")),
        kv_layer=op.attr("layer"),
        kv_bytes_per_token=state.bytes_per_block // (state.block * state.layers) if paged else None,
    )


def _sizes(op: Op) -> tuple[Any, ...]:
    """H, G, D and E of [1,H,S,D], [1,G,S,D], [1,G,S,E]."""
    q, v = tensor_of(op.args[0]).shape, tensor_of(op.args[2]).shape
    return q[1], v[1], q[3], v[3]


def _paged_sizes(op: Op, kv: KV) -> tuple[Any, ...]:
    """The same of a query [T,H,D] and a cache whose last stream holds values."""
    _, heads, size = tensor_of(op.args[0]).shape
    return heads, kv.streams[-1].heads, size, kv.streams[-1].head_size


def mask_in_words(predicate: Any) -> str:
    """causal, a window, chunks; any other predicate as it is."""
    if predicate in (True, sympy.true):
        return "none: every query sees every key"
    if (back := back_of(predicate)) is not None:
        return f"the token {back} back"
    terms = conjuncts(predicate)
    words = [_term_in_words(t) for t in terms]
    if any(w is None for w in words) or not is_causal(predicate):
        return f"general, kept as {print_attr(predicate)}"
    return ", ".join(sorted((w for w in words if w), key=lambda w: w != "causal"))


def back_of(predicate: Any) -> int | None:
    """n if one of the terms is k == q - n."""
    for term in conjuncts(predicate):
        if isinstance(term, sympy.Eq):
            for difference in (term.lhs - term.rhs, term.rhs - term.lhs):
                back = sympy.expand(difference + QUERY - KEY)
                if back.is_Integer and back >= 0:
                    return int(back)
    return None


def _term_in_words(term: Any) -> str | None:
    if is_causal(term):
        return "causal"
    if (size := window_of(term)) is not None:
        return f"window of {size}"
    size = chunk_of(term)
    return None if size is None else f"chunks of {size}"
