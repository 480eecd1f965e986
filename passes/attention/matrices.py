"""Matrices [S,S] that weights and positions alone make, by which tokens are weighted: M[q,k] of the query and
the key.

Where M[q,k] = w_k * a_(k+1) * .. * a_q for all keys up to the query and 0 for later ones, which retention's
decays, running means and exponential averages are however they are written, it is a linear recurrence with
the factors a. That is read off the matrix at the length of the context, element by element. The matrix of a
shorter sequence must be its first rows and columns: only ops are followed of which that is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from ir.dims import free_names, normalize, product, symbol, upper_bound
from ir.graph import Arg, Op, Scalar, Value
from ir.interpret import Array
from ir.ops import OPS, InferError
from ir.predicates import KEY, QUERY
from passes.attention import arithmetic
from passes.attention.cases import Element, always, combine
from passes.attention.elements import HEAD, Elements, cases_of
from passes.attention.indexing import Index, Sizes, broadcast, pull, shape_of
from passes.attention.static import Copy, NotStatic
from passes.match import attribute, is_float

Emit = Callable[..., Value]

S = symbol("S")
MAX_ELEMENTS = 1 << 25  # of a matrix that is evaluated
OF_ITSELF, OF_ROW = 2e-5, 1e-6  # how far an element may be from the product: of itself, of its row's largest
_SIZES = ("shape", "size", "stop")  # attributes that _keeps_first_elements looks at
_FACTORS = ("mul", "div", "cast", "neg", "where")


class NoMatrix(ValueError):
    """It cannot be shown to be such a matrix."""


@dataclass(frozen=True)
class Factors:
    """Reads elements of scores as Elements does. Elements of matrices are symbols of `elements`."""

    elements: Elements

    @property
    def sizes(self) -> Sizes:
        return self.elements.sizes

    def at(self, arg: Arg, index: Index) -> Element:
        """Element `index` of an operand. Raises Unreadable."""
        used = set[Any]().union(*(i.free_symbols for i in index))
        op = self.elements.producer(arg)
        if op is None or not isinstance(arg, Value) or not is_float(arg) or not {QUERY, KEY} & used:
            return self.elements.at(arg, index)
        if is_constant(arg, self.elements.producer):
            return always(self.elements.opaque_symbol(op, index, "matrix"))
        moved = pull(op, arg.name, index, self.sizes)
        if moved is not None:
            return self.at(*moved)
        if op.kind not in _FACTORS:
            return self.elements.at(arg, index)
        operands = [self.at(a, broadcast(index, shape_of(a))) for a in op.args]
        with cases_of(op):
            if op.kind == "div" and self.is_matrix(operands[1].only):
                return combine(_over, *operands)
            return arithmetic.apply(op, operands, self.elements.limit)

    def is_matrix(self, symbol: Any) -> bool:
        source = self.elements.opaque.get(symbol)
        return source is not None and is_constant(source.op.out, self.elements.producer)


def _over(x: Any, y: Any) -> Any:
    return x / y


def is_constant(arg: Arg, producer: Callable[[Arg], Op | None]) -> bool:
    """Whether weights, literals and the sequence length alone make it."""
    op = producer(arg)
    if op is None:
        return not isinstance(arg, Value)
    return all(is_constant(a, producer) for a in op.args)


@dataclass
class Weighting:
    """The product of elements of matrices, each to a power, and a number; [H or 1,C,C] at the context C."""

    elements: Elements
    terms: tuple[tuple[Any, int], ...]  # (symbol, 1 or -1)
    scale: float
    lower: bool  # whether later keys count for nothing, whatever the matrices hold

    def check(self) -> None:
        """Raise NoMatrix where the product is no recurrence."""
        _check_factors(self._evaluated(self.emit))

    def emit(self, emit: Emit) -> Value:
        """The ops that make it. Raises NoMatrix."""
        context = self.context
        total: Value | None = None
        for name, power in self.terms:
            source = self.elements.opaque[name]
            made = self._arranged(self._at(source.op.out, emit), source.index, emit)
            if total is None and power == 1:
                total = made
            else:
                one = Scalar(1.0) if total is None else total
                total = emit("mul" if power == 1 else "div", one, made)
        assert total is not None
        total = total if self.scale == 1 else emit("mul", total, Scalar(self.scale))
        total = emit("expand", total, shape=(shape_of(total)[0], context, context))
        if not self.lower:
            return total
        at = emit("iota", size=context)
        later = emit("gt", at, emit("reshape", at, shape=(context, 1)))
        return emit("where", later, Scalar(0.0), total)

    @property
    def context(self) -> int:
        found = upper_bound(normalize(self.elements.sizes[QUERY]), self.elements.dims)
        if found is None or found < 2:
            raise NoMatrix("the context has no limit")
        if found * found * self.elements.sizes[HEAD] > MAX_ELEMENTS:
            raise NoMatrix(f"a matrix of positions is too large at the context of {found}")
        return found

    def _evaluated(self, make: Callable[[Emit], Value]) -> Array:
        copy = Copy.named("matrix", self.elements.producer)
        try:
            return copy.evaluate(make(copy.emit), self.elements.tables.read)
        except (InferError, NotStatic) as error:
            raise NoMatrix(str(error)) from None

    def _arranged(self, arg: Value, index: Index, emit: Emit) -> Value:
        """[H or 1,C or 1,C or 1] of an array with axes for the head, the query and the key in any order."""
        axes = {i: axis for axis, i in enumerate(index) if i in (HEAD, QUERY, KEY)}
        ones = [axis for axis, i in enumerate(index) if i == 0 and shape_of(arg)[axis] == 1]
        if len(axes) + len(ones) < len(index):
            raise NoMatrix("a matrix is not read at the query, the key and the head")
        perm = (*ones, *(axes[i] for i in (HEAD, QUERY, KEY) if i in axes))
        if perm != tuple(range(len(perm))):
            arg = emit("transpose", arg, perm=perm)
        limits = ((HEAD, self.elements.sizes[HEAD]), (QUERY, self.context), (KEY, self.context))
        return emit("reshape", arg, shape=tuple(size if i in axes else 1 for i, size in limits))

    def _at(self, arg: Arg, emit: Emit) -> Any:
        """A value at the length of the context: all that it is at shorter ones are its first elements."""
        if not isinstance(arg, Value) or self.elements.is_static(arg):
            return arg
        op = self.elements.producer(arg)
        if op is None or any(d != S for d in shape_of(arg) if free_names(d)):
            raise NoMatrix("it depends on the sequence length")
        if op.kind in ("sum", "softmax"):
            return self._summed(op, emit)
        if not OPS[op.kind].pointwise and not _keeps_first_elements(op, self.context):
            raise NoMatrix(f"what {op.kind} gives may depend on the sequence length")
        for name, value in op.attrs.items():
            if name not in _SIZES and free_names(value):
                raise NoMatrix(f"its {name} depends on the sequence length")
        attrs = {name: _long(value, self.context) for name, value in op.attrs.items()}
        return emit(op.kind, *(self._at(a, emit) for a in op.args), **attrs)

    def _summed(self, op: Op, emit: Emit) -> Value:
        """Over other axes than positions, or over keys of which the later ones count for nothing."""
        sizes = shape_of(op.args[0])
        axes = (op.attr("axis"),) if op.kind == "softmax" else tuple(op.attr("axes"))
        over = [axis for axis in axes if free_names(sizes[axis])]
        if over and (over != [len(sizes) - 1] or sizes[-2:] != (S, S)):
            raise NoMatrix(f"{op.kind} runs over positions")
        if over:
            checked = op.out if op.kind == "softmax" else op.args[0]
            found = self._evaluated(
                lambda own: self._redone(op, own) if checked is op.out else self._at(op.args[0], own)
            )
            if not np.all(np.triu(found, 1) == 0):
                raise NoMatrix(f"{op.kind} runs over later keys")
        return self._redone(op, emit)

    def _redone(self, op: Op, emit: Emit) -> Value:
        return emit(op.kind, *(self._at(a, emit) for a in op.args), **op.attrs)


def _long(attr: Any, context: int) -> Any:
    """An attribute at the length of the context."""
    if isinstance(attr, tuple):
        return tuple(_long(each, context) for each in cast("tuple[Any, ...]", attr))
    return context if not isinstance(attr, str) and attr == S else attr


def _keeps_first_elements(op: Op, context: int) -> bool:
    """Whether the result at a shorter length is the first elements of that at the context."""
    sizes = shape_of(op.args[0]) if op.args else ()
    match op.kind:
        case "iota":
            return op.attr("size") == S
        case "full" | "expand" | "transpose" | "cumsum":
            return True
        case "reshape":
            return _long_axes(sizes) == _long_axes(shape_of(op.out))
        case "take" | "embed":  # places may be counted from the end of an axis
            axis, table = (op.attr("axis"), op.args[0]) if op.kind == "take" else (0, op.args[1])
            return not free_names(shape_of(table)[axis])
        case "concat":
            return not any(free_names(shape_of(a)[op.attr("axis")]) for a in op.args)
        case "slice":
            size, stop = sizes[op.attr("axis")], op.attr("stop")
            if not free_names(size) and not free_names(stop):
                return True
            first = op.attr("start") == 0 and stop == S and attribute(op, "step") == 1
            return first and (size == S or (isinstance(size, int) and size >= context))
        case _:
            return False


def _long_axes(sizes: tuple[Any, ...]) -> list[Any]:
    """How many elements come before each axis of positions."""
    return [product(sizes[:axis]) for axis, size in enumerate(sizes) if free_names(size)]


def _check_factors(found: Array) -> None:
    """Raise NoMatrix unless elements are products of factors between the key and the query."""
    matrix = found.astype(np.float64)
    if not np.isfinite(matrix).all():
        raise NoMatrix("a matrix holds what is no number")
    if np.triu(matrix, 1).any():
        raise NoMatrix("a matrix weights later keys")
    own, next_ = np.diagonal(matrix, 0, 1, 2), np.diagonal(matrix, -1, 1, 2)
    with np.errstate(all="ignore"):
        logs = np.log(next_ / own[:, :-1])
    if not np.isfinite(logs).all():
        raise NoMatrix("a matrix does not keep a positive share of each token")
    total = np.concatenate([np.zeros_like(own[:, :1]), logs.cumsum(1)], 1)
    for rows, starts, sums in zip(matrix, own, total, strict=True):
        made = np.tril(starts * np.exp(np.minimum(sums[:, None] - sums, 700.0)))
        largest = np.abs(rows).max(1, keepdims=True)
        if (np.abs(made - rows) > OF_ITSELF * np.abs(rows) + OF_ROW * largest).any():
            raise NoMatrix("a matrix weights keys in other ways than by factors between them and the query")


def tables(weighting: Weighting, emit: Emit) -> tuple[Value, Value]:
    """[C,H or 1]: what each token counts for at itself, and the log of what it keeps of those before."""
    matrix, context = weighting.emit(emit), weighting.context
    heads = shape_of(matrix)[0]
    flat = emit("reshape", matrix, shape=(heads, context * context))

    def at(count: int, start: int) -> Value:
        places = emit("mul", emit("iota", size=count), Scalar(context + 1))
        places = places if start == 0 else emit("add", places, Scalar(start))
        return emit("take", flat, places, axis=1)

    own = at(context, 0)
    before = emit("slice", own, axis=1, start=0, stop=context - 1)
    logs = emit("log", emit("div", at(context - 1, context), before))
    first = emit("full", shape=(heads, 1), value=0.0, dtype="f32")
    kept = emit("concat", first, logs, axis=1)
    return emit("transpose", own, perm=(1, 0)), emit("transpose", kept, perm=(1, 0))
