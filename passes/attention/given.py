"""An attention op that a model came with: its mask, an operand or a predicate, becomes a proved predicate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from ir.dims import FloorDiv, Table
from ir.graph import Arg, Op
from ir.predicates import KEY, QUERY
from ir.rewrite import View
from passes.attention.elements import HEAD, Elements, Unreadable
from passes.attention.heads import find_heads
from passes.attention.indexing import Sizes, shape_of
from passes.attention.prover import OUT, SIZE, Prover, refused
from passes.attention.scores import Scores
from passes.attention.written_out import stated

_ZERO = sympy.Integer(0)


def with_mask(prover: Prover, op: Op, view: View) -> Arg:
    """The attention with a proved predicate; None if it has one already. Raises PassError."""
    q, k, v = op.args[:3]
    length = shape_of(q)[2]
    sizes = prover.sizes(length, h=shape_of(q)[1], d=shape_of(q)[3], e=shape_of(v)[3])
    elements = prover.elements(view, sizes)
    scores = _scores(prover, op, elements)
    if _operand(op, 4) is not None and (scores.bias is not None or scores.shifted):
        raise refused(op, "this attention has sinks, and something added to its scores besides")
    biased = scores.bias is not None or bool(scores.distances)
    if _operand(op, 5) is not None and biased:
        raise refused(op, "this attention has slopes, and a bias in its mask besides")
    predicate, tables = prover.proved(op, scores.keep, length, view)
    stated_by = "stated by the call" if _operand(op, 3) is None else "read from the mask operand"
    prover.remember(op.outs[0].name, stated_by, scores, length)
    bias = scores.emit_bias(elements, view.op) if biased else _operand(op, 5)
    k, v = _narrowed(k, v, sizes, view)
    if scores.keyed:
        q, k, v = prover.keyed(op, (q, k, v), scores, elements, op.attr("scale"), view)
    if op.attr("mask") == predicate and (k, v, *tables) == (*op.args[1:3], *op.args[6:]):
        return None
    attrs = stated(op.attr("scale"), op.attr("softcap", 0.0))
    return view.op("attention", q, k, v, None, _operand(op, 4), bias, *tables, mask=predicate, **attrs)


def _scores(prover: Prover, op: Op, elements: Elements) -> Scores:
    """What the op's mask adds to its scores, and where they count."""
    mask, given = _operand(op, 3), op.attr("mask")
    if mask is not None:
        return prover.scores(op, elements, mask, (_ZERO, HEAD, QUERY, KEY), has_dot=False)
    if given is None:
        hint = "give it a causal mask (is_causal=True); encoders, which read both ways, cannot be compiled"
        raise refused(op, "this attention has no mask, so every query sees later keys", hint)
    return Scores(None, 1, 0, None, _with_tables(op, sympy.sympify(given), elements))


def _with_tables(op: Op, predicate: Any, elements: Elements) -> Any:
    """The op's predicate, its tables read through the operands that hold them."""
    tables = op.args[6:]
    try:
        read = {t: elements.at(tables[int(t.args[0])], tuple(t.args[1:])) for t in predicate.atoms(Table)}
    except Unreadable as error:
        raise refused(error.op or op, error.reason) from None
    for table, found in read.items():
        if isinstance(found, Table) and found.args[1:] == table.args[1:]:
            elements.tables.keep(int(found.args[0]), tables[int(table.args[0])])
    return predicate.xreplace(read)


def _narrowed(k: Arg, v: Arg, sizes: Sizes, view: View) -> Sequence[Arg]:
    """Keys and values before they were repeated for the query heads that share them."""
    heads, here = sizes[HEAD], shape_of(k)[1]
    group = _ZERO if here == 1 else FloorDiv(HEAD, heads // here)
    key = find_heads(k, (_ZERO, group, KEY, SIZE), KEY, SIZE, sizes, view.producer)
    value = find_heads(v, (_ZERO, group, KEY, OUT), KEY, OUT, sizes, view.producer)
    if key is None or value is None or key.heads != value.heads or key.heads == here:
        return k, v
    if key.factor != 1 or value.factor != 1:
        return k, v
    return key.emit(view.op), value.emit(view.op)


def _operand(op: Op, place: int) -> Arg:
    return op.args[place] if place < len(op.args) else None
