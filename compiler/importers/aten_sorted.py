"""Converters of ATen ops on rows that a model sorts by expert, to multiply each expert's at once.

Which rows come where, and how many an expert has, depends on values, which sizes of the IR do not. But the
rows are put back: so a row [S*k, F] sorted by expert is kept here as [S,k,F] in its first order, and the
product of each expert's rows with its own matrix is moe_linear. An order is never an operand of the IR. What
has no converter here is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from compiler.importers import aten_choose, aten_pointwise, aten_shape
from compiler.importers.context import Context, part_dtype
from compiler.importers.refused import ImportRefused
from ir.dims import product
from ir.graph import Op
from ir.types import Tensor

_FLAT = frozenset({"aten.view.default", "aten.reshape.default", "aten.flatten.using_ints"})

TODO = "Sort the flattened indices of a top-k, split by their counts, multiply each part, join them in order"


@dataclass(frozen=True)
class Order:
    """The order of pairs of token and slot by their experts [S,k]: the pairs' numbers, or their tokens'."""

    experts: Any
    node: Any  # what the exported graph has the experts from
    tokens: bool = False


@dataclass(frozen=True)
class Rows:
    """[S*k, F] sorted by `order`, as [S,k,F] unsorted; [S,1,F] where the rows of a token are the same."""

    value: Any
    order: Order


@dataclass(frozen=True)
class Part:
    """The rows of one expert; with w and b, what its linear gives of them."""

    rows: Rows
    expert: int
    w: Any = None
    b: Any = None


def holds(found: Any) -> bool:
    return isinstance(found, Order | Rows | Part)


def convert(c: Context, target: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The result of an op that has an order, rows or a part among its operands."""
    if target in ON_SORTED:
        return ON_SORTED[target](c, *args, **kwargs)
    if target not in POINTWISE:
        raise ImportRefused("this op has no converter for rows that are sorted by expert", todo=TODO)
    rows = [a for a in args if isinstance(a, Rows)]
    if not rows or any(r.order != rows[0].order for r in rows):
        raise ImportRefused("it joins rows that are sorted in different orders", todo=TODO)
    for arg in args:
        if isinstance(arg, Order | Part) or (hasattr(arg, "type") and c.type(arg).rank > 1):
            raise ImportRefused("it joins sorted rows with others that are not", todo=TODO)
    plain = [a.value if isinstance(a, Rows) else a for a in args]
    return Rows(aten_pointwise.TABLE[target](_Slots(c), *plain, **kwargs), rows[0].order)


class _Slots(Context):
    """The same call on [S,k,F]: of the type that torch says, only the element type is right."""

    def __init__(self, c: Context) -> None:
        super().__init__(c.build, c.node, c.loc, c.context, c.limits, c.constant)

    @property
    def out(self) -> Tensor:
        return Tensor(part_dtype(self.node.meta["val"].dtype), ())


def _sort(c: Context, x: Any, axis: int = -1, descending: bool = False) -> Any:
    """Of the flattened experts of all tokens: their order. Any other sort is one of a row."""
    found = None if descending else _flattened(c.node.args[0])
    if found is None:
        return aten_choose.TABLE["aten.sort.default"](c, x, axis, descending)
    shape = tuple(c.dim(n) for n in found.meta["val"].shape)
    order = Order(c.reshape(x, shape), found)
    return Rows(c.reshape(order.experts, (*shape, 1)), order), order


def _flattened(node: Any) -> Any:
    """The indices [S,k] of a top-k that a node is all the elements of, in their order; None for another."""
    if node.meta["val"].ndim != 1 or str(node.target) not in _FLAT:
        return None
    source = node.args[0]
    return source if source.meta["val"].ndim == 2 and _is_topk(source) else None


def _is_topk(node: Any) -> bool:
    """Whether a node is the indices of a top-k, of which no two in a row are equal."""
    taken = getattr(node.target, "__name__", "") == "getitem" and node.args[1] == 1
    return taken and str(node.args[0].target) == "aten.topk.default" and _last_axis(node.args[0])


def _last_axis(node: Any) -> bool:
    axis = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", -1)
    return axis in (-1, node.args[0].meta["val"].ndim - 1)


def _divide(c: Context, order: Any, by: Any, *, rounding_mode: str | None = "floor") -> Order:
    """The token of each pair."""
    if (
        not isinstance(order, Order)
        or order.tokens
        or by != c.type(order.experts).shape[1]
        or not rounding_mode
    ):
        raise ImportRefused("the order of sorted rows is divided by another number than the slots", todo=TODO)
    return Order(order.experts, order.node, tokens=True)


def _index(c: Context, x: Any, indices: Any) -> Rows:
    """Rows of tokens, or of pairs, in the order of their experts."""
    if len(indices) != 1 or not isinstance(indices[0], Order) or holds(x):
        raise ImportRefused("indexing with an order is not by rows", todo=TODO)
    order, shape = indices[0], c.type(x).shape
    tokens, slots = c.type(order.experts).shape
    rows = (tokens, 1 if order.tokens else slots)
    if shape[0] != product(rows):
        raise ImportRefused(f"{list(shape)} are not the rows that were sorted", todo=TODO)
    return Rows(c.reshape(x, (*rows, *shape[1:])), Order(order.experts, order.node))


def _split(c: Context, rows: Any, sizes: Any, axis: int = 0) -> Any:
    """Along the features; or into each expert's rows, where the sizes are the experts' counts."""
    if isinstance(rows, Rows) and axis not in (0, -c.node.args[0].meta["val"].ndim):
        widths = tuple(c.dim(part.shape[axis]) for part in c.node.meta["val"])
        at = axis + 1 if axis > 0 else c.type(rows.value).rank + axis
        parts = c.op("split", rows.value, axis=at, sizes=widths, several=True)
        return tuple(Rows(p, rows.order) for p in parts)
    if not isinstance(rows, Rows) or not isinstance(sizes, list) or _counted(sizes) is not rows.order.node:
        raise ImportRefused("sorted rows are split by what is not shown to be the experts' counts", todo=TODO)
    return tuple(Part(rows, expert) for expert in range(len(sizes)))


def _counted(sizes: list[Any]) -> Any:
    """The experts [S,k] of which sizes are the counts, expert by expert; None where they are not."""
    found = [_element(size) for size in sizes]
    counts = found[0][0] if found[0] is not None else None
    if any(f is None or f[0] is not counts or f[1] != i for i, f in enumerate(found)) or counts is None:
        return None
    if counts.meta["val"].shape != (len(sizes),) or str(counts.target) != "aten.sum.dim_IntList":
        return None
    ones = counts.args[0]
    ones = ones.args[0] if str(ones.target) == "aten._to_copy.default" else ones
    if counts.args[1] != [0] or str(ones.target) != "aten.scatter.value" or not _into_zeros(ones):
        return None
    axis, experts, value = ones.args[1:4]
    return experts if axis in (1, -1) and value == 1 and _is_topk(experts) else None


def _into_zeros(scatter: Any) -> bool:
    base = scatter.args[0]
    return str(base.target) in ("aten.zeros.default", "aten.zeros_like.default")


def _element(size: Any) -> tuple[Any, int] | None:
    """The vector and the index that a number is read from."""
    if str(getattr(size, "target", "")) != "aten._local_scalar_dense.default":
        return None
    node = size.args[0]
    if str(node.target) == "aten.select.int" and node.args[1] == 0:
        return node.args[0], node.args[2]
    node = node.args[0] if str(node.target).startswith("aten.squeeze.") else node
    if str(node.target) != "aten.slice.Tensor" or node.args[1] != 0 or node.args[3] != node.args[2] + 1:
        return None
    return node.args[0], node.args[2]


def _linear(c: Context, part: Any, w: Any, b: Any = None) -> Part:
    if not isinstance(part, Part) or part.w is not None or not c.is_constant(w):
        raise ImportRefused("sorted rows of several experts have one matrix", todo=TODO)
    return Part(part.rows, part.expert, w, b)


def _cat(c: Context, parts: Any, axis: int = 0) -> Rows:
    """The linears of all experts, in order: one of stacked matrices."""
    first = parts[0]
    whole = isinstance(first, Part) and axis in (0, -2) and len(parts) == _num_experts(first.rows.order)
    for expert, part in enumerate(parts):
        if not whole or not _follows(c, first, part, expert):
            raise ImportRefused("parts of sorted rows are not joined as they were split", todo=TODO)
    rows, order = first.rows.value, first.rows.order
    tokens, same, width = c.type(rows).shape
    x = c.reshape(rows, (tokens, width)) if same == 1 else rows
    w = _stacked(c, [part.w for part in parts])
    bias = None if first.b is None else _stacked(c, [c.reshape(p.b, (1, *c.type(p.b).shape)) for p in parts])
    return Rows(c.op("moe_linear", x, w, order.experts, bias, num_experts=len(parts)), order)


def _follows(c: Context, first: Part, part: Any, expert: int) -> bool:
    """Whether a part is the given expert's, with a matrix of the first one's size."""
    if not isinstance(part, Part) or part.w is None or first.w is None or part.expert != expert:
        return False
    same = part.rows == first.rows and (part.b is None) == (first.b is None)
    return same and c.type(part.w).shape == c.type(first.w).shape


def _num_experts(order: Order) -> int:
    """Those that the top-k chose from."""
    return order.node.args[0].args[0].meta["val"].shape[-1]


def _stacked(c: Context, matrices: list[Any]) -> Any:
    """[N,K] of each expert as [E*N,K]: the array that they are cut from, where it is one."""
    cut = [_cut(c, w) for w in matrices]
    if cut[0] is not None and all(f == (cut[0][0], i) for i, f in enumerate(cut)):
        whole = cut[0][0]
        count, *rows, width = c.type(whole).shape
        if count == len(matrices):
            return c.reshape(whole, (product((count, *rows)), width) if rows else (count, width))
    return c.op("concat", *matrices, axis=0)


def _cut(c: Context, w: Any) -> tuple[Any, int] | None:
    """The array and the index along its first axis that a matrix is."""
    moved = _producer(c, w)
    cut = _producer(c, moved.args[0]) if moved is not None and moved.kind == "reshape" else None
    if cut is None or cut.kind != "slice" or cut.attr("axis") or cut.attr("stop") != cut.attr("start") + 1:
        return None
    return cut.args[0], cut.attr("start")


def _producer(c: Context, value: Any) -> Op | None:
    return next((op for op in reversed(c.build.ops) if value in op.outs), None)


def _index_put(c: Context, x: Any, indices: Any, rows: Any, accumulate: bool = False) -> Any:
    """x plus rows, each put where it was before they were sorted, or added up by token."""
    order = indices[0] if len(indices) == 1 else None
    if not accumulate or not isinstance(order, Order) or not isinstance(rows, Rows) or holds(x):
        raise ImportRefused("sorted rows are not added to where they were", todo=TODO)
    if order.experts != rows.order.experts:
        raise ImportRefused("rows are put back in another order than they were sorted in", todo=TODO)
    tokens, slots = c.type(order.experts).shape
    width = c.type(rows.value).shape[2:]
    value = rows.value
    if c.type(value).shape[1] != slots:
        value = c.op("expand", value, shape=(tokens, slots, *width))
    out = (
        c.op("sum", value, axes=(1,))
        if order.tokens
        else c.reshape(value, (product((tokens, slots)), *width))
    )
    return out if c.filled_with(x) == 0 else c.op("add", c.tensor(x), out)


def _index_add(c: Context, x: Any, axis: int, order: Any, rows: Any, *, alpha: Any = 1) -> Any:
    if axis != 0 or alpha != 1:
        raise ImportRefused("sorted rows are not added to where they were", todo=TODO)
    return _index_put(c, x, [order], rows, accumulate=True)


def _slice(c: Context, rows: Any, axis: int = 0, start: Any = None, stop: Any = None, step: int = 1) -> Any:
    if axis == 0:
        if start or step != 1 or (stop is not None and stop < aten_shape.END):
            raise ImportRefused("only some of the rows that are sorted by expert are read", todo=TODO)
        return rows
    axis = axis + 1 if axis > 0 else axis
    return Rows(aten_shape.TABLE["aten.slice.Tensor"](c, rows.value, axis, start, stop, step), rows.order)


def _unsqueeze(c: Context, rows: Any, axis: int) -> Rows:
    shape = c.type(rows.value).shape
    at = axis + 1 if axis > 0 else len(shape) + 1 + axis
    if at < 2:
        raise ImportRefused("rows that are sorted by expert get an axis before them", todo=TODO)
    return Rows(c.reshape(rows.value, (*shape[:at], 1, *shape[at:])), rows.order)


POINTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "abs.default", "exp.default",
        "tanh.default", "sigmoid.default", "relu.default", "silu.default", "gelu.default", "clamp.default",
        "clone.default", "alias.default", "detach.default", "_to_copy.default", "type_as.default",
        "pow.Tensor_Scalar",
    )
) & frozenset(aten_pointwise.TABLE)  # fmt: skip

ON_SORTED: dict[str, Callable[..., Any]] = {
    "aten.div.Tensor_mode": _divide,
    "aten.floor_divide.default": _divide,
    "aten.index.Tensor": _index,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    "aten.linear.default": _linear,
    "aten.cat.default": _cat,
    "aten.index_put.default": _index_put,
    "aten.index_add.default": _index_add,
    "aten.slice.Tensor": _slice,
    "aten.unsqueeze.default": _unsqueeze,
}

FROM_PLAIN: dict[str, Callable[..., Any]] = {"aten.sort.default": _sort}
