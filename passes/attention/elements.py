"""What one element of a value is, as an expression over positions: producers are walked back from an index.

The query's position is `q`, the key's `k`, the head `h`. Results of matmul and softmax, per-head numbers made
from weights, and what depends on the key's token alone, or the query's, become symbols whose meaning is kept
on the side. What cannot be followed is refused at its op.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import sympy

from ir.dims import Bounds, free_names, symbol
from ir.graph import Arg, Op, Scalar, Value, Weight
from ir.predicates import KEY, QUERY
from ir.types import DType, Tensor
from passes.attention import arithmetic
from passes.attention.cases import (
    Cases,
    CasesError,
    Element,
    always,
    choose,
    combine,
    exact,
    number,
)
from passes.attention.indexing import (
    ZERO,
    Index,
    Sizes,
    broadcast,
    flatten,
    is_never_negative,
    pull,
    shape_of,
)
from passes.attention.static import is_positive
from passes.attention.tables import Tables

HEAD = symbol("h")
TOKENS = "token"  # symbols of what depends on the key's token are called so, and a number
ROWS = "row"  # and those of what depends on the query's
DISTANCES = "distance"  # and those of what is added by distance
POSITIONS = "pos"  # the graph input that holds each token's position


class Unreadable(ValueError):
    """An element depends on something that is not a position. `op` is where."""

    def __init__(self, op: Op | None, reason: str) -> None:
        self.op, self.reason = op, reason
        super().__init__(reason)


@contextmanager
def cases_of(op: Op) -> Generator[None]:
    """What an op's operands give that cannot be followed is Unreadable at it."""
    try:
        yield
    except CasesError as error:
        raise Unreadable(op, f"{op.kind} {error}") from None


@dataclass(frozen=True)
class Source:
    """What an opaque symbol stands for: element `index` of a value, and the op that made it."""

    op: Op
    index: Index


@dataclass
class Elements:
    """Reads elements of one graph.

    sizes: exclusive limit of each index symbol. dims: bounds of the graph's symbols.
    opaque, per_head: what the symbols that are not positions stand for.
    """

    producer: Callable[[Arg], Op | None]
    dims: Mapping[str, Bounds]
    tables: Tables
    sizes: Sizes
    opaque: dict[Any, Source] = field(default_factory=dict[Any, Source])
    per_head: dict[Any, Value | Weight] = field(default_factory=dict[Any, "Value | Weight"])
    _found: dict[tuple[str, Index], Element] = field(default_factory=dict[tuple[str, Index], Element])
    _of_token: bool = False  # while an element of one token is read

    def at(self, arg: Arg, index: Index) -> Element:
        """Element `index` of an operand. Raises Unreadable."""
        if isinstance(arg, Scalar):
            return number(arg.value)
        if isinstance(arg, Weight | Value) and (head := self._per_head(arg, index)) is not None:
            return always(head)
        if isinstance(arg, Weight):
            return self.tables.at(arg, index)
        if not isinstance(arg, Value):
            raise Unreadable(None, "an operand is missing")
        key = (arg.name, index)
        if key not in self._found:
            self._found[key] = self._of_token_or_read(arg, index)
        return self._found[key]

    def _of_token_or_read(self, value: Value, index: Index) -> Element:
        """An element that is no function of positions, but of the head and the key's token or the query's, is
        a symbol."""
        used = set[Any]().union(*(i.free_symbols for i in index))
        name = {frozenset({KEY}): TOKENS, frozenset({QUERY}): ROWS}.get(frozenset(used - {HEAD}))
        if self._of_token or name is None or not _is_float(value):
            return self._read(value, index)
        self._of_token = True
        try:
            return self._read(value, index)
        except Unreadable:
            op = self.producer(value)
            if op is None:
                raise
            return always(self.opaque_symbol(op, index, name))
        finally:
            self._of_token = False

    def _read(self, value: Value, index: Index) -> Element:
        op = self.producer(value)
        if op is None:
            if value.name == POSITIONS:
                return always(index[-1])
            raise Unreadable(None, f"it depends on the input %{value.name}")
        try:
            with cases_of(op):
                return self._evaluate(op, value.name, index)
        except Unreadable as error:
            if error.op is None:
                raise Unreadable(op, error.reason) from None
            raise

    def _evaluate(self, op: Op, out: str, index: Index) -> Element:
        moved = pull(op, out, index, self.sizes)
        if moved is not None:
            return self.at(*moved)
        special = _SPECIAL.get(op.kind)
        if special is not None:
            return special(self, op, index)
        if op.kind not in arithmetic.KINDS:
            raise Unreadable(op, f"{op.kind} is not a function of positions")
        operands = [self.at(a, broadcast(index, shape_of(a))) for a in op.args]
        if op.kind == "pow" and (power := self._power_of_head(*operands)) is not None:
            return power
        return arithmetic.apply(op, operands, self.limit)

    def _power_of_head(self, base: Element, exponent: Element) -> Element | None:
        """A positive number of the head's to the power of positions."""
        if not isinstance(base, Cases) or not isinstance(exponent, Cases) or len(base.items) != 1:
            return None
        ((head, _),) = base.items
        if head not in self.per_head or not all(leaf.is_integer for leaf, _ in exponent.items):
            return None
        if not is_positive(self.per_head[head], self.producer, self.tables.read):
            return None
        return combine(_power, base, exponent)

    def limit(self, leaf: Any) -> int | None:
        """The largest magnitude of an integer leaf below the context."""
        return arithmetic.magnitude(leaf, self.sizes, self.dims)

    def _per_head(self, arg: Value | Weight, index: Index) -> Any:
        """A symbol for element h of a float vector [H] that is made from weights and literals alone."""
        used = set[Any]().union(*(i.free_symbols for i in index)) if index else set[Any]()
        if used != {HEAD} or not _is_float(arg) or not self.is_static(arg):
            return None
        flat = flatten(index, shape_of(arg))
        heads = self.sizes[HEAD]
        if sympy.prod(shape_of(arg)) != heads or flat != HEAD:
            return None
        found = next((s for s, a in self.per_head.items() if a == arg), None)
        if found is None:
            found = sympy.Symbol(f"head{len(self.per_head)}", real=True)
            self.per_head[found] = arg
        return found

    def is_static(self, arg: Arg) -> bool:
        """Whether weights and literals alone make it."""
        if not isinstance(arg, Value):
            return arg is not None
        op = self.producer(arg)
        if op is None or any(free_names(d) for d in shape_of(arg)) or op.kind == "dim":
            return False
        return all(self.is_static(a) for a in op.args)

    def opaque_symbol(self, op: Op, index: Index, name: str = "") -> Any:
        source = Source(op, index)
        for known, other in self.opaque.items():
            if other == source:
                return known
        made = sympy.Symbol(f"{name or op.kind}{len(self.opaque)}", real=True)
        self.opaque[made] = source
        return made


def _power(base: Any, exponent: Any) -> Any:
    return base**exponent


def _is_float(arg: Value | Weight) -> bool:
    return isinstance(arg.type, Tensor) and arg.type.dtype.is_float


def _iota(_: Elements, op: Op, index: Index) -> Element:
    return always(index[0])


def _full(_: Elements, op: Op, index: Index) -> Element:
    value = op.attr("value")
    dtype = DType(op.attr("dtype", "f32"))
    return number(bool(value)) if dtype is DType.BOOL else always(exact(value))


def _dim(_: Elements, op: Op, index: Index) -> Element:
    return always(op.attr("size"))


class Reader(Protocol):
    """Reads elements, within the limits of index symbols."""

    @property
    def sizes(self) -> Sizes: ...
    def at(self, arg: Arg, index: Index) -> Element: ...


def concatenated(elements: Reader, op: Op, index: Index) -> Element:
    """The part that the index falls in, decided now if its range allows, else a choice."""
    axis = op.attr("axis")
    start: Any = ZERO
    parts: list[tuple[Any, Arg, Index]] = []  # (end, operand, index in it)
    for arg in op.args:
        parts.append((start + shape_of(arg)[axis], arg, _replace(index, axis, index[axis] - start)))
        start = parts[-1][0]
    inside = [p for p in parts if not arithmetic.never_below(index[axis], p[0], elements.sizes)]
    first = next(
        (i for i, p in enumerate(inside) if arithmetic.always_below(index[axis], p[0], elements.sizes)), None
    )
    inside = inside if first is None else inside[: first + 1]
    found = elements.at(*inside[-1][1:])
    for end, arg, at in reversed(inside[:-1]):
        found = choose(index[axis] < end, elements.at(arg, at), found)
    return found


def _replace(index: Index, axis: int, i: Any) -> Index:
    return (*index[:axis], sympy.expand(i), *index[axis + 1 :])


def _take(elements: Elements, op: Op, index: Index) -> Element:
    return _gathered(elements, op.args[0], op.args[1], op.attr("axis"), index)


def _embed(elements: Elements, op: Op, index: Index) -> Element:
    return _gathered(elements, op.args[1], op.args[0], 0, index)


def _gathered(elements: Elements, table: Arg, rows: Arg, axis: int, index: Index) -> Element:
    rank = len(shape_of(rows))
    chosen = elements.at(rows, index[axis : axis + rank])
    found: Element | None = None
    for row, guard in chosen.items:
        inside = is_never_negative(row, elements.sizes) and arithmetic.always_below(
            row, shape_of(table)[axis], elements.sizes
        )
        if not inside and not isinstance(table, Weight):  # the proof tries every index of an array
            raise CasesError(
                f"reads at {row}, which may be outside the {shape_of(table)[axis]} that there are"
            )
        here = elements.at(table, (*index[:axis], row, *index[axis + rank :]))
        found = here if found is None else choose(guard, here, found)
    return found


def _cumsum(elements: Elements, op: Op, index: Index) -> Element:
    """Of something that is the same all along the axis."""
    axis = op.attr("axis")
    probe = symbol("i")
    summed = elements.at(op.args[0], _replace(index, axis, probe))
    if not isinstance(summed, Cases) or any(
        probe in leaf.free_symbols | guard.free_symbols for leaf, guard in summed.items
    ):
        raise Unreadable(op, "cumsum of something that changes along the axis")
    return combine(_times(index[axis] + 1), summed)


def _times(factor: Any) -> Callable[..., Any]:
    def apply(leaf: Any) -> Any:
        return sympy.expand(leaf * factor)

    return apply


def _opaque(elements: Elements, op: Op, index: Index) -> Element:
    return always(elements.opaque_symbol(op, index))


_SPECIAL: dict[str, Callable[[Elements, Op, Index], Element]] = {
    "iota": _iota,
    "full": _full,
    "dim": _dim,
    "concat": concatenated,
    "take": _take,
    "embed": _embed,
    "cumsum": _cumsum,
    "matmul": _opaque,
    "softmax": _opaque,
}
