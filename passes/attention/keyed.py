"""A bias of the key's token: what a model adds to a score that depends on the key and the head alone.

It becomes one more element of each key, which queries multiply by a constant: q' = [q, c] and k' = [k, b],
scale * c * b' the bias. So every kernel and every format of the cache takes it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ir.graph import Arg, Op, Scalar, Value
from ir.ops import OPS
from ir.predicates import KEY
from ir.rewrite import View
from passes.attention.elements import Elements
from passes.attention.heads import find_heads
from passes.attention.indexing import shape_of
from passes.attention.scores import LARGEST_BIAS
from passes.match import dtype, is_float

_MOVES = ("reshape", "transpose", "expand", "slice", "split", "concat", "cast")


class NoBias(ValueError):
    """What is added is no bias of the key's token that can be carried along."""


Parts = tuple[Arg, Arg, Arg]  # q [1,H,S,D], k [1,G,S,D], v [1,G,S,E]


def with_key_bias(
    parts: Parts, keyed: tuple[tuple[Any, Any], ...], elements: Elements, scale: float, view: View
) -> Parts:
    """Queries, keys and values with the bias sum(factor * symbol) in them. Raises NoBias.

    keyed: (symbol of `elements`, factor).
    """
    q, k, v = parts
    power = 2.0 ** round(-math.log2(scale))  # a power of 2: exact in every type
    bias: Value | None = None
    for key, factor in keyed:
        part = _per_head(elements, key, view)
        part = view.op("mul", part, Scalar(float(factor) / (scale * power)))
        bias = part if bias is None else view.op("add", *as_many([bias, part], view))
    assert bias is not None
    if dtype(bias) is not dtype(k):
        bias = view.op("cast", bias, dtype=str(dtype(k)))
    k, v, bias = as_many([k, v, bias], view)
    ones = view.op("full", shape=(*shape_of(q)[:3], 1), value=power, dtype=str(dtype(q)))
    return view.op("concat", q, ones, axis=3), view.op("concat", k, bias, axis=3), v


def _per_head(elements: Elements, key: Any, view: View) -> Value:
    """What a symbol stands for, as [1,heads,S,1]."""
    source = elements.opaque[key]
    if len(source.op.outs) != 1:
        raise NoBias(f"{source.op.kind} is added to scores")
    value = source.op.out
    _check_finite(value, view.producer)
    found = find_heads(value, source.index, KEY, None, elements.sizes, view.producer)
    if found is None:
        raise NoBias(f"{list(shape_of(value))} is added to scores, which is no number for each key and head")
    bias = found.emit(view.op)
    return bias if found.factor == 1 else view.op("mul", bias, Scalar(float(found.factor)))


def _check_finite(value: Value, producer: Callable[[Arg], Op | None]) -> None:
    """Refuse what chooses by a condition, or a large number: a mask of tokens, which may hide them all."""
    op = producer(value)
    if op is None or not (OPS[op.kind].pointwise or op.kind in _MOVES):
        return
    for arg in op.args:
        if isinstance(arg, Scalar) and abs(arg.value) > LARGEST_BIAS:
            raise NoBias(f"{arg.value} is added to scores of some tokens, as a mask that depends on them")
        if isinstance(arg, Value):
            if not is_float(arg):
                raise NoBias("something that depends on a condition of tokens is added to scores")
            _check_finite(arg, producer)


def as_many(parts: list[Any], view: View) -> list[Any]:
    """Each [1,heads,S,D] with as many heads as the one that has most."""
    most = max(shape_of(p)[1] for p in parts)
    return [repeated(p, most, view) for p in parts]


def repeated(x: Any, heads: int, view: View) -> Any:
    """Each of the heads of x [1,heads,S,D] as often as makes so many. Raises NoBias where none does."""
    _, here, length, size = shape_of(x)
    if here == heads:
        return x
    if heads % here:
        raise NoBias(f"{here} and {heads} heads do not go together")
    one = view.op("reshape", x, shape=(1, here, 1, length, size))
    many = view.op("expand", one, shape=(1, here, heads // here, length, size))
    return view.op("reshape", many, shape=(1, heads, length, size))
