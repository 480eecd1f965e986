"""Write what adds up over the tokens so far as linear recurrences: running sums, and attention without a
softmax.

(q k^T * D) v, where D is 0 for later keys and a ** (q - k) for the others, with a number a for each head, is
a recurrence with that decay: linear attention (arXiv 2006.16236) and retention (arXiv 2307.08621) as they are
trained. D may also be exp(c_q - c_k) where c is a running sum of what each token makes for each head (gated
linear attention, arXiv 2312.06635; Mamba-2), or any matrix of positions that is a product of factors between
the key and the query (passes/attention/matrices.py), which may stand alone, as a running mean's does. The sum
of scores over the keys, which some divide by, is the same with ones for values. So nothing of S x S is kept,
and the state is paged as any recurrence's.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import sympy

from ir.dims import product, symbol
from ir.graph import Arg, Graph, Op, Scalar, Value
from ir.interpret import WeightReader
from ir.predicates import KEY, QUERY
from ir.rewrite import Miss, Rule, View, rewrite
from passes.attention.elements import HEAD, Elements
from passes.attention.heads import find_heads
from passes.attention.indexing import broadcast
from passes.attention.keyed import NoBias, as_many, repeated
from passes.attention.linear import LinearScores, NotLinear, origin, read_linear
from passes.attention.matrices import Weighting, is_constant, tables
from passes.attention.prover import OUT, SIZE, Prover
from passes.attention.tables import Tables
from passes.base import Pass, Result, result
from passes.match import attribute, is_float, shape

S = symbol("S")


@dataclass(frozen=True)
class ScanTokens(Pass):
    """read: finds a weight's array by name, for masks that are arrays. The pipeline hands it over."""

    read: WeightReader | None = field(default=None, repr=False, compare=False)

    def run(self, graph: Graph) -> Result:
        prover = Prover(graph, Tables(self.read))
        attentions = (
            Rule("linear attention", ("matmul",), partial(_linear_attention, prover)),
            Rule("linear attention", ("sum",), partial(_total, prover)),
        )
        found = result(rewrite(graph, attentions))  # which reads running sums
        sums = result(rewrite(found.graph, (Rule("running sum", ("cumsum",), _running_sum),)))
        return replace(sums, count=found.count + sums.count, misses=found.misses)


def _running_sum(op: Op, view: View) -> Arg | None:
    """The sum of x [1,..,S,..] over the tokens up to each."""
    x, axis, sizes = op.args[0], attribute(op, "axis"), shape(op.out)
    if not is_float(x) or sizes[axis] != S or axis == 0 or sizes[0] != 1:
        return None
    before, after = product(sizes[1:axis]), product(sizes[axis + 1 :])
    if not isinstance(before, int) or not isinstance(after, int):
        return None
    if after > 1 or before == 1:
        rows = view.op("reshape", x, shape=(1, before, S, after))
        found = view.op("transpose", _summed(rows, view), perm=(0, 2, 1, 3))
        return view.op("reshape", found, shape=sizes)
    turned = view.op("transpose", view.op("reshape", x, shape=(1, before, S)), perm=(0, 2, 1))
    found = _summed(view.op("reshape", turned, shape=(1, 1, S, before)), view)
    back = view.op("transpose", view.op("reshape", found, shape=(1, S, before)), perm=(0, 2, 1))
    return view.op("reshape", back, shape=sizes)


def _summed(rows: Value, view: View) -> Value:
    """[1,S,H,V] of rows [1,H,S,V]."""
    ones = view.op("full", shape=(1, 1, S, 1), value=1.0, dtype="f32")
    kept = view.op("full", shape=(1, shape(rows)[1], S, 1), value=0.0, dtype="f32")
    return view.op("recurrence", ones, ones, rows, kept)


def _linear_attention(prover: Prover, op: Op, view: View) -> Arg | Miss | None:
    """Scores [..,S,S] times v [..,S,E]."""
    sizes, factors = shape(op.out), shape(op.args[0])
    if len(factors) > 1 and factors[-1] == S and is_constant(op.args[1], view.producer):
        return _from_the_right(op, view)
    if isinstance(sizes[-2], int) or len(factors) < 2 or isinstance(factors[-1], int):
        return None
    return _replaced(prover, op, op.args[0], op.args[1], sizes[:-1], view)


def _from_the_right(op: Op, view: View) -> Arg | None:
    """x [..,E,S] times a matrix [..,S,S] of positions, as its transpose times [..,S,E]."""
    if shape(op.args[1])[-2:] != (S, S) or is_constant(op.args[0], view.producer):
        return None
    x, matrix = (_turned(arg, view) for arg in op.args)
    return _turned(view.op("matmul", matrix, x), view)


def _turned(arg: Arg, view: View) -> Value:
    last = len(shape(arg)) - 1
    return view.op("transpose", arg, perm=(*range(last - 1), last, last - 1))


def _total(prover: Prover, op: Op, view: View) -> Arg | Miss | None:
    """The sum of scores [..,S,S] over the keys."""
    sizes = shape(op.args[0])
    if len(sizes) < 2 or isinstance(sizes[-1], int) or isinstance(sizes[-2], int):
        return None
    if tuple(attribute(op, "axes")) != (len(sizes) - 1,):
        return None
    return _replaced(prover, op, op.args[0], None, sizes[:-1], view)


def _replaced(
    prover: Prover, op: Op, scores: Arg, v: Arg, rows: tuple[Any, ...], view: View
) -> Arg | Miss | None:
    """rows: sizes of the result's axes up to the query's. v: None for ones."""
    *lead, length = rows
    heads = product(tuple(lead))
    if not isinstance(heads, int):
        return None
    size = 1 if v is None else shape(op.out)[-1]
    elements = prover.elements(view, prover.sizes(length, h=heads, e=size))
    try:
        found = read_linear(prover, op, scores, elements, tuple(lead), view)
        if found is None or (found.dot is None and v is None):
            return None
        return _emit(op, found, elements, v, length, view)
    except (NotLinear, NoBias) as reason:
        return Miss("linear attention", op, str(reason))


def _emit(op: Op, found: LinearScores, elements: Elements, v: Arg, length: Any, view: View) -> Value:
    heads = elements.sizes[HEAD]
    q, k = _factors(found, elements, length, view)
    if found.scale != 1:
        q = view.op("mul", q, Scalar(float(found.scale)))
    if v is None:
        values = view.op("full", shape=(1, heads, length, 1), value=1.0, dtype="f32")
    else:
        index = broadcast((*found.lead, KEY, OUT), shape(v))
        values = repeated(_heads(v, index, KEY, elements.sizes, view, OUT), heads, view)
    if isinstance(found.rate, Weighting):
        own, decay = (_by_position(x, heads, length, view) for x in tables(found.rate, view.op))
        values = view.op("mul", values, own)
    else:
        decay = _decay(found.rate, elements, length, view)
    out = view.op("recurrence", q, k, values, decay)
    turned = view.op("transpose", out, perm=(0, 2, 1, 3))
    return turned if turned.type == op.out.type else view.op("reshape", turned, shape=shape(op.out))


def _by_position(table: Value, heads: int, length: Any, view: View) -> Value:
    """[1,H,S,1] of a table [C,H or 1]."""
    rows = view.op("embed", view.op("iota", size=length), table)
    turned = view.op(
        "reshape", view.op("transpose", rows, perm=(1, 0)), shape=(1, shape(table)[1], length, 1)
    )
    return turned if shape(table)[1] == heads else view.op("expand", turned, shape=(1, heads, length, 1))


def _factors(found: LinearScores, elements: Elements, length: Any, view: View) -> list[Value]:
    """Queries and keys [1,heads,S,size]."""
    if found.dot is None:
        ones = view.op("full", shape=(1, elements.sizes[HEAD], length, 1), value=1.0, dtype="f32")
        return [ones, ones]
    source = elements.opaque[found.dot]
    *lead, row, column = source.index
    if {row, column} != {QUERY, KEY}:
        raise NotLinear("the scores are not a product of queries and keys at their own positions")
    x, y = source.op.args
    sizes = {**elements.sizes, SIZE: shape(x)[-1]}
    left = _heads(x, (*lead, row, SIZE), row, sizes, view)
    right = _heads(y, (*lead, SIZE, column), column, sizes, view)
    q, k = (left, right) if row == QUERY else (right, left)
    return as_many([q, k], view)


def _heads(arg: Arg, index: Any, row: Any, sizes: Any, view: View, column: Any = SIZE) -> Value:
    """[1,heads,S,size], a literal factor that was on the way in it."""
    found = find_heads(arg, broadcast(index, shape(arg)), row, column, sizes, view.producer)
    if found is None:
        raise NotLinear(f"an operand {list(shape(arg))} does not split into heads")
    value = found.emit(view.op)
    return value if found.factor == 1 else view.op("mul", value, Scalar(float(found.factor)))


def _decay(rate: Any, elements: Elements, length: Any, view: View) -> Value:
    """[1,H,S,1] in log space."""
    heads = elements.sizes[HEAD]
    if rate in elements.opaque:
        return _summed_up(rate, elements, view)
    if not rate.free_symbols:
        return view.op("full", shape=(1, heads, length, 1), value=float(rate), dtype="f32")
    factor, head = rate.as_coeff_Mul()
    is_log = isinstance(head, sympy.log)
    found = elements.per_head.get(head.args[0] if is_log else head)
    if found is None:
        raise NotLinear(f"the decay {rate} is no number for each head")
    each = view.op("cast", view.op("reshape", found, shape=(1, heads, 1, 1)), dtype="f32")
    each = view.op("log", each) if is_log else each
    each = each if factor == 1 else view.op("mul", each, Scalar(float(factor)))
    return view.op("expand", each, shape=(1, heads, length, 1))


def _summed_up(row: Any, elements: Elements, view: View) -> Value:
    """What the running sum of a symbol adds up, [1,H,S,1]."""
    op, index = origin(row, elements)
    found = find_heads(op.args[0], index, QUERY, None, elements.sizes, view.producer)
    if found is None:
        raise NotLinear("the decay is no number for each head and token")
    each = found.emit(view.op)
    each = each if found.factor == 1 else view.op("mul", each, Scalar(float(found.factor)))
    return repeated(each, elements.sizes[HEAD], view)
