"""Where an element of a result comes from: its index, taken back through ops that move elements.

An index is one integer expression per axis over position symbols. `Sizes` gives each symbol's exclusive upper
limit, so that (h*S + q) // S is h.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import sympy

from ir.dims import FloorDiv
from ir.graph import Arg, Op, Value, Weight
from ir.types import Tensor

Index = tuple[Any, ...]
Sizes = Mapping[Any, Any]

ZERO = sympy.Integer(0)


def shape_of(arg: Arg) -> tuple[Any, ...]:
    """The shape of a tensor operand; a literal has none."""
    if isinstance(arg, Value | Weight) and isinstance(arg.type, Tensor):
        return arg.type.shape
    return ()


def broadcast(index: Index, shape: Sequence[Any]) -> Index:
    """The index into an operand of this shape that numpy broadcasts to a result's index."""
    own = index[len(index) - len(shape) :]
    return tuple(ZERO if size == 1 else i for i, size in zip(own, shape, strict=True))


def pull(op: Op, out: str, index: Index, sizes: Sizes) -> tuple[Arg, Index] | None:
    """The operand, and the index in it, that element `index` of result `out` is; None if op computes."""
    source = op.args[0] if op.args else None
    shape = shape_of(source)
    if op.kind == "reshape":
        return source, reshaped(index, op.attr("shape"), shape, sizes)
    if op.kind == "transpose":
        perm = tuple(op.attr("perm"))
        return source, tuple(index[perm.index(axis)] for axis in range(len(perm)))
    if op.kind == "expand":
        return source, broadcast(index, shape)
    if op.kind == "slice":
        return source, _shift(index, op.attr("axis"), op.attr("start"), op.attr("step", 1))
    if op.kind == "split":
        part = [v.name for v in op.outs].index(out)
        return source, _shift(index, op.attr("axis"), sum(op.attr("sizes")[:part]), 1)
    return None


def _shift(index: Index, axis: int, start: Any, step: int) -> Index:
    moved = sympy.expand(start + index[axis] * step)
    return (*index[:axis], moved, *index[axis + 1 :])


def flatten(index: Sequence[Any], shape: Sequence[Any]) -> Any:
    """The row-major number of an element."""
    flat: Any = ZERO
    for i, size in zip(index, shape, strict=True):
        flat = flat * size + i
    return _recombine(sympy.expand(flat))


def unflatten(flat: Any, shape: Sequence[Any], sizes: Sizes) -> Index:
    """The index of an element from its row-major number."""
    found: list[Any] = []
    for size in reversed(shape[1:]):
        flat, rest = _divide(flat, size, sizes)
        found.append(rest)
    return (flat, *reversed(found)) if shape else ()


def reshaped(index: Index, shape: Sequence[Any], source: Sequence[Any], sizes: Sizes) -> Index:
    """The index in `source` of an element of its reshape to `shape`, by groups of axes of equal size."""
    found: list[Any] = []
    for new, old in _groups(shape, source):
        flat = flatten([index[i] for i in new], [shape[i] for i in new])
        found += unflatten(flat, [source[i] for i in old], sizes) if old else ()
    return tuple(found)


def _groups(shape: Sequence[Any], source: Sequence[Any]) -> list[tuple[list[int], list[int]]]:
    """The fewest axes on both sides whose sizes multiply to the same, from the left."""
    groups: list[tuple[list[int], list[int]]] = []
    i, j = 0, 0
    while i < len(shape) or j < len(source):
        new, old = [i] if i < len(shape) else [], [j] if j < len(source) else []
        i, j = i + len(new), j + len(old)
        while (excess := _ratio(shape, new, source, old)) != 1:
            grow_new = i < len(shape) and (j >= len(source) or excess.as_numer_denom()[0] == 1)
            grow_old = j < len(source) and not grow_new
            if not grow_new and not grow_old:
                raise ValueError(f"{list(source)} does not reshape to {list(shape)}")
            new, i = ([*new, i], i + 1) if grow_new else (new, i)
            old, j = ([*old, j], j + 1) if grow_old else (old, j)
        groups.append((new, old))
    return groups


def _ratio(shape: Sequence[Any], new: list[int], source: Sequence[Any], old: list[int]) -> Any:
    top: Any = sympy.prod([sympy.sympify(shape[i]) for i in new])
    bottom: Any = sympy.prod([sympy.sympify(source[i]) for i in old])
    return sympy.cancel(top / bottom)


def _divide(expr: Any, size: Any, sizes: Sizes) -> tuple[Any, Any]:
    """(expr // size, expr mod size), exact where the terms that size does not divide stay below it."""
    if size == 1:
        return expr, ZERO
    whole: Any = ZERO
    rest: Any = ZERO
    for term in terms_of(expr):
        ratio = term / size
        if ratio.as_numer_denom()[1] == 1:
            whole += ratio
        else:
            rest += term
    fixed = {s: limit for s, limit in sizes.items() if s not in sympy.sympify(size).free_symbols}
    if _is_below(rest, size, sizes) or _is_below(rest, size, fixed):
        return whole, rest
    return FloorDiv(expr, size), sympy.Mod(expr, size)


def terms_of(expr: Any) -> tuple[Any, ...]:
    """What a sum adds up."""
    expanded: Any = sympy.expand(expr)
    return tuple(expanded.args) if isinstance(expanded, sympy.Add) else (expanded,)


def _is_below(expr: Any, size: Any, sizes: Sizes) -> bool:
    limits = limits_of(expr, sizes)
    if limits is None:
        return False
    low, high = (sympy.expand(e) for e in limits)
    return bool(low.is_nonnegative) and is_never_negative(size - 1 - high, sizes)


def is_never_negative(expr: Any, sizes: Sizes) -> bool:
    """Whether an integer expression is known to be at least 0."""
    expr = sympy.expand(expr)
    if expr.is_nonnegative:
        return True
    limits = limits_of(expr, sizes)
    return limits is not None and bool(sympy.expand(limits[0]).is_nonnegative)


def limits_of(expr: Any, sizes: Sizes) -> tuple[Any, Any] | None:
    """The least and greatest value of an integer expression, over its symbols' ranges; None if not known."""
    if expr in sizes:
        return ZERO, sizes[expr] - 1
    if isinstance(expr, sympy.Integer | sympy.Symbol):
        return expr, expr
    args: list[Any] = list(expr.args)
    if isinstance(expr, sympy.Mod):
        return ZERO, args[1] - 1
    inner = [limits_of(a, sizes) for a in args]
    if any(i is None for i in inner):
        return None
    lows, highs = [i[0] for i in inner if i], [i[1] for i in inner if i]
    if isinstance(expr, sympy.Add):
        return sum(lows), sum(highs)
    if isinstance(expr, sympy.Max | sympy.Min):
        return expr.func(*lows), expr.func(*highs)
    if isinstance(expr, sympy.Mul):
        return _product_limits(lows, highs)
    if isinstance(expr, FloorDiv) and isinstance(args[1], sympy.Integer):
        return FloorDiv(lows[0], args[1]), FloorDiv(highs[0], args[1])
    return None


def _product_limits(lows: list[Any], highs: list[Any]) -> tuple[Any, Any] | None:
    """Of a number times factors that are not negative."""
    sign = -1 if lows[0] == highs[0] and lows[0].is_negative else 1
    if not all((sympy.expand(low)).is_nonnegative for low in lows[1 if sign < 0 else 0 :]):
        return None
    low, high = sympy.prod(lows), sympy.prod(highs)
    return (high, low) if sign < 0 else (low, high)


def _recombine(expr: Any) -> Any:
    """n * (a // n) + a mod n -> a."""
    for part in sorted(cast("set[Any]", expr.atoms(sympy.Mod)), key=str):
        a, n = part.args
        factor = expr.coeff(part)
        joined = sympy.expand(expr - factor * part - factor * n * FloorDiv(a, n) + factor * a)
        if not joined.has(FloorDiv(a, n)):
            expr = joined
    return expr
