"""Recognise attention and prove its mask.

Both softmax(q k^T) v written out and `attention` ops with a mask operand become `attention` ops whose
mask is a predicate of positions, proved never to look ahead (see passes.masks.proof). What cannot be
proved is refused at its op.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

from ir.dims import FloorDiv, Table, normalize, symbol, upper_bound
from ir.graph import Arg, Graph, Op, Value
from ir.interpret import WeightReader
from ir.ops import OPS
from ir.predicates import KEY, QUERY
from ir.rewrite import Miss, Rule, View, rewrite
from passes.base import Pass, PassError, Result, result
from passes.masks.cases import Cases
from passes.masks.elements import HEAD, Elements, Unreadable
from passes.masks.heads import Heads, find_heads
from passes.masks.indexing import Index, broadcast, shape_of, unflatten
from passes.masks.proof import MaskRefused, prove
from passes.masks.scores import Scores, read_scores
from passes.masks.tables import Tables

SIZE, OUT = symbol("d"), symbol("e")  # an element of a query or key; of a value

_PASSING = ("reshape", "transpose", "expand", "slice", "cast")  # between softmax and the product with v


@dataclass(frozen=True)
class FuseAttention(Pass):
    """read: finds a weight's array by name, for masks that are arrays. The pipeline hands it over."""

    read: WeightReader | None = field(default=None, repr=False, compare=False, metadata={"option": False})

    def run(self, graph: Graph) -> Result:
        fuser = _Fuser(graph, Tables(self.read))
        rules = (
            Rule("attention", ("matmul",), fuser.written_out),
            Rule("mask", ("attention",), fuser.with_mask),
        )
        return result(rewrite(graph, rules))


@dataclass
class _Near(Exception):
    """The pattern began to match."""

    reason: str


@dataclass
class _Fuser:
    """What the rules of one run share: tables and proofs."""

    graph: Graph
    tables: Tables
    proofs: dict[Any, Any] = field(default_factory=dict[Any, Any])

    def written_out(self, op: Op, view: View) -> Arg | Miss | None:
        """softmax(...) @ v -> attention."""
        softmax = _softmax_behind(op.args[0], view)
        if softmax is None:
            return None
        try:
            return _WrittenOut(self, op, softmax, view).replacement()
        except _Near as near:
            return Miss("attention", op, near.reason)

    def with_mask(self, op: Op, view: View) -> Arg | None:
        """An attention op with a mask operand, or an unproved predicate, gets a proved predicate."""
        q, k, v, mask = op.args[:4] if len(op.args) > 3 else (*op.args, None)
        given = op.attr("mask")
        if mask is None and given is None:
            hint = "a causal language model's attention needs a causal mask"
            raise PassError(
                "fuse_attention", op, "this attention has no mask, so every query sees later keys", hint
            )
        heads, size, length = shape_of(q)[1], shape_of(q)[3], shape_of(q)[2]
        sizes = {QUERY: length, KEY: length, HEAD: heads, SIZE: size, OUT: shape_of(v)[3]}
        elements = self.elements(view, sizes)
        if mask is None:
            scores = Scores(None, 1, 0, None, self._from_attr(op, elements))
        else:
            scores = self.scores(op, elements, mask, (sympy.Integer(0), HEAD, QUERY, KEY), has_dot=False)
        predicate, tables = self.proved(op, scores.keep, length, view)
        key = find_heads(k, (sympy.Integer(0), _group(k, heads), KEY, SIZE), KEY, SIZE, sizes, view.producer)
        value = find_heads(v, (sympy.Integer(0), _group(v, heads), KEY, OUT), KEY, OUT, sizes, view.producer)
        k, v = _narrowed(k, v, key, value, view)
        slopes = _optional(op, 5) if scores.bias is None else self.slopes(op, scores, elements, view)
        args = (q, k, v, None, _optional(op, 4), slopes, *tables)
        if mask is None and predicate == given and tuple(args[:3]) == op.args[:3] and tables == op.args[6:]:
            return None
        attrs = {name: a for name, a in OPS["attention"].complete(op.attrs).items() if name != "mask"}
        return view.op("attention", *args, mask=predicate, **_stated(attrs))

    def _from_attr(self, op: Op, elements: Elements) -> Any:
        """The op's predicate, its tables read through the operands that hold them."""
        given, tables = op.attr("mask"), op.args[6:]
        for entry in given.atoms(Table):
            i, a, b = entry.args
            try:
                given = given.xreplace({entry: elements.at(tables[int(i)], (a, b))})
            except Unreadable as error:
                raise PassError("fuse_attention", error.op or op, error.reason) from None
        return given

    def elements(self, view: View, sizes: dict[Any, Any]) -> Elements:
        return Elements(view.producer, self.graph.dims, self.tables, sizes)

    def scores(self, op: Op, elements: Elements, arg: Arg, index: Index, has_dot: bool) -> Scores:
        """Scores (or an additive mask) read from their element. Raises PassError."""
        try:
            return read_scores(elements.at(arg, broadcast(index, shape_of(arg))), has_dot)
        except Unreadable as error:
            reason = f"the attention mask cannot be shown to be a function of positions: {error.reason}"
            raise PassError("fuse_attention", error.op or op, reason) from None
        except MaskRefused as error:
            raise PassError("fuse_attention", op, error.reason, error.hint) from None

    def proved(self, op: Op, predicate: Any, length: Any, view: View) -> tuple[Any, tuple[Arg, ...]]:
        """The proved predicate and the tables it reads; each different mask is proved once."""
        try:
            if (predicate, length) not in self.proofs:
                context = upper_bound(normalize(length), self.graph.dims)
                self.proofs[predicate, length] = prove(predicate, context, self.tables.grids)
        except MaskRefused as error:
            raise PassError("fuse_attention", op, error.reason, error.hint) from None
        return self.tables.emit(self.proofs[predicate, length], view.op)

    @staticmethod
    def slopes(op: Op, scores: Scores, elements: Elements, view: View) -> Arg:
        if _optional(op, 5) is not None and scores.bias is not None:
            raise PassError("fuse_attention", op, "this attention has both slopes and a bias in its mask")
        return None if scores.bias is None else scores.bias.emit(elements, view.op)


@dataclass
class _WrittenOut:
    """One softmax(scores) @ v. The axes before [S, size] (`lead`) are flattened to heads."""

    fuser: _Fuser
    op: Op
    softmax: Op
    view: View

    def replacement(self) -> Value:
        shape = shape_of(self.op.out)
        length, heads = shape[-2], sympy.prod(shape[:-2])
        if not heads.is_Integer or isinstance(length, int):
            raise _Near(f"its result {list(shape)} is not [heads, S, size]")
        sizes = {QUERY: length, KEY: length, HEAD: int(heads), OUT: shape[-1]}
        elements = self.fuser.elements(self.view, sizes)
        lead = unflatten(HEAD, shape[:-2], sizes)
        index = self.softmax_index(elements, lead)
        scores_arg = _without_maximum(self.softmax.args[0], self.view)
        scores = self.fuser.scores(self.softmax, elements, scores_arg, index, has_dot=True)
        sinks = self.sinks(elements, scores_arg, index, length)
        if sinks is not None and scores.bias is not None:
            raise PassError("fuse_attention", self.softmax, "this attention has both sinks and ALiBi")
        q, k = self.query_and_key(elements, scores.dot)
        v = self.heads(self.op.args[1], (*lead, KEY, OUT), KEY, OUT, sizes)
        return self.emit(scores, elements, q, k, v, sinks)

    def softmax_index(self, elements: Elements, lead: Index) -> Index:
        """Which element of the softmax a probability of (h, q, k) is."""
        try:
            found = elements.at(self.op.args[0], broadcast((*lead, QUERY, KEY), shape_of(self.op.args[0])))
        except Unreadable as error:
            raise _Near(f"the probabilities are changed after the softmax: {error.reason}") from None
        source = elements.opaque.get(found.only) if isinstance(found, Cases) else None
        if source is None or source.op is not self.softmax:
            raise _Near("the probabilities are changed after the softmax")
        rank = len(source.index)
        if self.softmax.attr("axis") != rank - 1 or source.index[-1] != KEY:
            raise _Near("the softmax is not over the keys")
        return source.index

    def sinks(self, elements: Elements, scores: Arg, index: Index, length: Any) -> Arg:
        """The extra logit of each head, where the softmax is over one more column than there are keys."""
        width = shape_of(scores)[-1]
        if width == length:
            return None
        if sympy.expand(width - length) != 1:
            raise _Near(f"the softmax is over {width} columns, not over the {length} keys")
        try:
            found = elements.at(scores, (*index[:-1], sympy.sympify(length)))
        except Unreadable as error:
            raise PassError("fuse_attention", error.op or self.softmax, error.reason) from None
        head = elements.per_head.get(found.only) if isinstance(found, Cases) else None
        if head is None:
            raise PassError(
                "fuse_attention", self.softmax, "the softmax's extra column is not one weight per head"
            )
        wanted = (elements.sizes[HEAD],)
        return head if shape_of(head) == wanted else self.view.op("reshape", head, shape=wanted)

    def query_and_key(self, elements: Elements, dot: Any) -> tuple[Heads, Heads]:
        source = elements.opaque[dot]
        if source.op.kind != "matmul" or source.index[-2:] != (QUERY, KEY):
            raise _Near("the scores are not a product of queries and keys at their own positions")
        x, y = source.op.args
        sizes = {**elements.sizes, SIZE: shape_of(x)[-1]}
        lead = source.index[:-2]
        q = self.heads(x, (*lead, QUERY, SIZE), QUERY, SIZE, sizes)
        return q, self.heads(y, (*lead, SIZE, KEY), KEY, SIZE, sizes)

    def heads(self, arg: Arg, index: Index, row: Any, column: Any, sizes: dict[Any, Any]) -> Heads:
        found = find_heads(arg, broadcast(index, shape_of(arg)), row, column, sizes, self.view.producer)
        if found is None:
            raise _Near(f"an operand {list(shape_of(arg))} does not split into heads")
        return found

    def emit(self, scores: Scores, elements: Elements, q: Heads, k: Heads, v: Heads, sinks: Arg) -> Value:
        heads, length = elements.sizes[HEAD], elements.sizes[QUERY]
        predicate, tables = self.fuser.proved(self.softmax, scores.keep, length, self.view)
        if v.factor != 1 or q.heads != heads or k.heads != v.heads:
            raise _Near(f"{q.heads} query, {k.heads} key and {v.heads} value heads do not go together")
        slopes = None if scores.bias is None else scores.bias.emit(elements, self.view.op)
        attrs = {"scale": float(scores.scale * q.factor * k.factor), "softcap": float(scores.softcap)}
        args = (*(part.emit(self.view.op) for part in (q, k, v)), None, sinks, slopes, *tables)
        out = self.view.op("attention", *args, mask=predicate, **_stated(attrs))  # [1,S,H,E]
        out = self.view.op("transpose", out, perm=(0, 2, 1, 3))
        wanted = shape_of(self.op.out)
        return out if shape_of(out) == wanted else self.view.op("reshape", out, shape=wanted)


def _stated(attrs: dict[str, Any]) -> dict[str, Any]:
    """The attributes without softcap where there is none."""
    return {name: value for name, value in attrs.items() if name != "softcap" or value}


def _optional(op: Op, place: int) -> Arg:
    return op.args[place] if place < len(op.args) else None


def _softmax_behind(arg: Arg, view: View) -> Op | None:
    """The softmax over tokens that a value is, apart from movement."""
    op = view.producer(arg)
    while op is not None and op.kind in _PASSING:
        op = view.producer(op.args[0])
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


def _group(arg: Arg, heads: int) -> Any:
    """The index of query head h's key/value head."""
    repeats = heads // shape_of(arg)[1]
    return sympy.Integer(0) if repeats == heads else FloorDiv(HEAD, repeats)


def _narrowed(k: Arg, v: Arg, key: Heads | None, value: Heads | None, view: View) -> Sequence[Arg]:
    """Keys and values before they were repeated for the query heads that share them."""
    if key is None or value is None or key.heads != value.heads or key.heads == shape_of(k)[1]:
        return k, v
    if key.factor != 1 or value.factor != 1:
        return k, v
    return key.emit(view.op), value.emit(view.op)
