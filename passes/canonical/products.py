"""Canonical form of products of tokens, and of softmax: each axis of its own, the last one summed over."""

from __future__ import annotations

from ir.dims import free_names, product
from ir.graph import Op
from ir.rewrite import Miss, Replacement, Rule, View
from passes.match import attribute, shape


def _rows_of_heads(op: Op, view: View) -> Replacement | Miss:
    """[.., heads * S, D] times one matrix for all heads, which an einsum makes -> [.., heads, S, D]."""
    x, y = op.args
    rows, made = shape(x)[-2], view.made_by(x, "reshape")
    if made is None or len(shape(y)) != len(shape(x)) or not free_names(rows):
        return None
    sizes = [size for size in shape(made.args[0]) if size != 1]
    where = next((i for i, size in enumerate(sizes) if free_names(size)), None)
    if where is None or product(tuple(sizes[where + 1 :])) != shape(x)[-1]:
        return None
    heads, length, first = 1, sizes[where], where
    while first and heads * length != rows:
        first -= 1
        heads = heads * sizes[first]
    if heads == 1 or heads * length != rows:
        return None
    left = view.op("reshape", made.args[0],
                   shape=(*shape(x)[:-2], heads, length, shape(x)[-1]))  # fmt: skip
    right = view.op("reshape", y, shape=(*shape(y)[:-2], 1, *shape(y)[-2:]))
    return view.op("reshape", view.op("matmul", left, right), shape=shape(op.out))


def _softmax_of_last(op: Op, view: View) -> Replacement | Miss:
    """A softmax over another axis of fixed size, as over states of several layers."""
    axis, last = attribute(op, "axis"), len(shape(op.out)) - 1
    if axis == last or not isinstance(shape(op.out)[axis], int):
        return None
    perm = list(range(last + 1))
    perm[axis], perm[last] = last, axis
    turned = view.op("softmax", view.op("transpose", op.args[0], perm=tuple(perm)), axis=last)
    return view.op("transpose", turned, perm=tuple(perm))


RULES = (
    Rule("rows of heads", ("matmul",), _rows_of_heads),
    Rule("softmax over the last axis", ("softmax",), _softmax_of_last),
)
