"""softmax(q k^T) v, written out as matmuls and a softmax, becomes one attention op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy

from ir.dims import product
from ir.graph import Arg, Op, Value
from ir.predicates import KEY, QUERY
from ir.rewrite import Miss, View
from ir.types import Tensor
from passes.attention.cases import Cases
from passes.attention.elements import HEAD, Elements, Unreadable
from passes.attention.heads import Heads, find_heads
from passes.attention.indexing import Index, broadcast, shape_of, unflatten
from passes.attention.keyed import as_many
from passes.attention.matrices import is_constant
from passes.attention.prover import OUT, SIZE, Prover, refused
from passes.attention.scores import Scores
from passes.match import dtype, literal

_AFTER_SOFTMAX = ("reshape", "transpose", "expand", "slice", "split", "cast", "mul", "div", "where")


class Near(Exception):
    """The pattern began to match; why it does not."""


def written_out(prover: Prover, op: Op, view: View) -> Arg | Miss | None:
    """The attention that a matmul completes, if its first operand is a softmax over tokens."""
    softmax = softmax_behind(op.args[0], view)
    if softmax is None or is_constant(softmax.out, view.producer):
        return None
    try:
        return _WrittenOut(prover, op, softmax, view).replacement()
    except Near as near:
        return Miss("attention", op, str(near))


def softmax_written_out(op: Op, view: View) -> Arg | None:
    """exp(x) / sum(exp(x)) -> softmax; (exp(x) @ v) / sum(exp(x)) -> softmax @ v; with 1 + sum(exp(x)), of
    one more column of zeros."""
    product = view.made_by(op.args[0], "matmul")
    weights = op.args[0] if product is None else product.args[0]
    exp, total, more = view.made_by(weights, "exp"), view.made_by(op.args[1], "sum", "add"), False
    if total is not None and total.kind == "add":
        total, more = view.made_by(total.args[0], "sum"), literal(total.args[1]) == 1.0
        if not more:
            return None
    if exp is None or total is None or total.args[0] != weights or not total.attr("keepdims", False):
        return None
    if tuple(total.attr("axes")) != (len(shape_of(weights)) - 1,):
        return None
    found = _normalised(exp.args[0], more, view)
    return found if product is None else view.op("matmul", found, product.args[1])


def _normalised(x: Arg, more: bool, view: View) -> Value:
    """exp(x) / sum(exp(x)), or with one more exp(0) in the sum."""
    sizes = shape_of(x)
    last = len(sizes) - 1
    if not more:
        return view.op("softmax", _without_maximum(x, view), axis=last)
    column = view.op("full", shape=(*sizes[:-1], 1), value=0.0, dtype=str(dtype(x)))
    found = view.op("softmax", view.op("concat", x, column, axis=last), axis=last)
    return view.op("slice", found, axis=last, start=0, stop=sizes[-1])


def stated(scale: float, softcap: float) -> dict[str, Any]:
    """The attributes, without softcap where there is none."""
    return {"scale": scale, "softcap": softcap} if softcap else {"scale": scale}


@dataclass
class _WrittenOut:
    """One softmax(scores) @ v. The axes before [S, size] (`lead`) are flattened to heads."""

    prover: Prover
    op: Op
    softmax: Op
    view: View

    def replacement(self) -> Value:
        shape = shape_of(self.op.out)
        length, heads = shape[-2], product(shape[:-2])
        if not isinstance(heads, int) or isinstance(length, int):
            raise Near(f"its result {list(shape)} is not [heads, S, size]")
        elements = self.prover.elements(self.view, self.prover.sizes(length, h=heads, e=shape[-1]))
        lead = unflatten(HEAD, shape[:-2], elements.sizes)
        index = self.softmax_index(elements, lead)
        scores_arg = _without_maximum(self.softmax.args[0], self.view)
        scores = self.prover.scores(self.softmax, elements, scores_arg, index, has_dot=True)
        sinks = self.sinks(elements, scores_arg, index, length)
        if sinks is not None and (scores.bias is not None or scores.shifted):
            raise refused(self.softmax, "this attention has sinks, and something added to its scores besides")
        q, k = self.query_and_key(elements, scores.dot)
        v = self.heads(self.op.args[1], (*lead, KEY, OUT), KEY, OUT, elements.sizes)
        return self.emit(scores, elements, q, k, v, sinks)

    def softmax_index(self, elements: Elements, lead: Index) -> Index:
        """Which element of the softmax a probability of (h, q, k) is."""
        probabilities = self.op.args[0]
        try:
            found = elements.at(probabilities, broadcast((*lead, QUERY, KEY), shape_of(probabilities)))
        except Unreadable as error:
            raise Near(f"the probabilities are changed after the softmax: {error.reason}") from None
        source = elements.opaque.get(found.only) if isinstance(found, Cases) else None
        if source is None or source.op is not self.softmax:
            raise Near("the probabilities are changed after the softmax")
        place = source.index[-1]  # or one further, beside an extra first column
        if self.softmax.attr("axis") != len(source.index) - 1 or place not in (KEY, KEY + 1):
            raise Near("the softmax is not over the keys")
        return source.index

    def sinks(self, elements: Elements, scores: Arg, index: Index, length: Any) -> Arg:
        """The extra logit of each head, where the softmax is over one more column than there are keys: the
        last, or the first."""
        width, first = shape_of(scores)[-1], index[-1] != KEY
        if width == length and not first:
            return None
        if sympy.expand(width - length) != 1:
            raise Near(f"the softmax is over {width} columns, not over the {length} keys")
        try:
            found = elements.at(scores, (*index[:-1], sympy.Integer(0) if first else length))
        except Unreadable as error:
            raise refused(error.op or self.softmax, error.reason) from None
        only = found.only if isinstance(found, Cases) else None
        head, wanted = elements.per_head.get(only), (elements.sizes[HEAD],)
        if only is not None and only.is_Number and only.is_finite:
            return self.view.op("full", shape=wanted, value=float(only), dtype="f32")
        if head is None:
            raise refused(self.softmax, "the softmax's extra column is not one weight per head")
        return head if shape_of(head) == wanted else self.view.op("reshape", head, shape=wanted)

    def query_and_key(self, elements: Elements, dot: Any) -> tuple[Heads, Heads]:
        source = elements.opaque[dot]
        if source.op.kind != "matmul" or set(source.index[-2:]) != {QUERY, KEY}:
            raise Near("the scores are not a product of queries and keys at their own positions")
        x, y = source.op.args
        *lead, row, column = source.index
        sizes = {**elements.sizes, SIZE: shape_of(x)[-1]}
        left = self.heads(x, (*lead, row, SIZE), row, SIZE, sizes)
        right = self.heads(y, (*lead, SIZE, column), column, SIZE, sizes)
        return (left, right) if row == QUERY else (right, left)

    def heads(self, arg: Arg, index: Index, row: Any, column: Any, sizes: Any) -> Heads:
        found = find_heads(arg, broadcast(index, shape_of(arg)), row, column, sizes, self.view.producer)
        if found is None:
            raise Near(f"an operand {list(shape_of(arg))} does not split into heads")
        return found

    def emit(self, scores: Scores, elements: Elements, q: Heads, k: Heads, v: Heads, sinks: Arg) -> Value:
        heads, length = elements.sizes[HEAD], elements.sizes[QUERY]
        most, least = max(k.heads, v.heads), min(k.heads, v.heads)
        if v.factor != 1 or q.heads != heads or most % least:
            raise Near(f"{q.heads} query, {k.heads} key and {v.heads} value heads do not go together")
        predicate, tables = self.prover.proved(self.softmax, scores.keep, length, self.view)
        bias = scores.emit_bias(elements, self.view.op)
        scale = float(scores.scale * q.factor * k.factor)
        # keys that are rotated once they are repeated have more heads than values
        parts = (q.emit(self.view.op), *as_many([k.emit(self.view.op), v.emit(self.view.op)], self.view))
        if scores.keyed:
            parts = self.prover.keyed(self.softmax, parts, scores, elements, scale, self.view)
        attrs = stated(scale, float(scores.softcap))
        args = (*parts, None, sinks, bias, *tables)
        out = self.view.op("attention", *args, mask=predicate, **attrs)  # [1,S,H,E]
        self.prover.remember(out.name, "read from scores that are written out", scores, length)
        return self.shaped(self.view.op("transpose", out, perm=(0, 2, 1, 3)))

    def shaped(self, out: Value) -> Value:
        """The result in the matmul's own type."""
        wanted = self.op.out.type
        if isinstance(wanted, Tensor) and isinstance(out.type, Tensor) and out.type.dtype is not wanted.dtype:
            out = self.view.op("cast", out, dtype=str(wanted.dtype))
        return out if out.type == wanted else self.view.op("reshape", out, shape=shape_of(self.op.out))


def softmax_behind(arg: Arg, view: View) -> Op | None:
    """The softmax over tokens that a value is made from."""
    op = view.producer(arg)
    while op is not None and op.kind in _AFTER_SOFTMAX:
        op = view.producer(next((a for a in op.args[op.kind == "where" :] if isinstance(a, Value)), None))
    if op is None or op.kind != "softmax" or isinstance(shape_of(op.out)[-1], int):
        return None
    return op


def _without_maximum(arg: Arg, view: View) -> Arg:
    """x of x - max(x), which softmax does by itself."""
    op = view.made_by(arg, "sub")
    largest = view.made_by(op.args[1], "max") if op is not None else None
    if op is None or largest is None or largest.args[0] != op.args[0]:
        return arg
    last = len(shape_of(arg)) - 1
    return op.args[0] if tuple(largest.attr("axes")) == (last,) else arg
