"""Pointwise ops on elements: exact arithmetic over integers, fractions and symbols."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
from sympy.logic.boolalg import And, Or

from ir.dims import Bounds, FloorDiv, free_names, upper_bound
from ir.graph import Op, Value, Weight
from ir.types import DType, Tensor
from passes.attention.cases import (
    Cases,
    CasesError,
    Element,
    always,
    as_number,
    choose,
    combine,
    compare,
    exact,
)
from passes.attention.indexing import Sizes, is_never_negative, limits_of
from passes.attention.proof import negation

Limit = Callable[[Any], "int | None"]

VERY_LOW = -1e4  # a score lowered by this much has no weight in a softmax
EXACT_F32 = 2**24  # integers up to here are exact in single precision
EXACT_INT = 2**31
LARGEST_DIVISOR = 2**16


def magnitude(leaf: Any, sizes: Sizes, dims: Mapping[str, Bounds]) -> int | None:
    """The largest absolute value of an integer expression of positions; None if not known."""
    limits = limits_of(sympy.expand(leaf), sizes)
    if limits is None:
        return None
    if any(dims.get(n, (1, None))[1] is None for e in limits for n in free_names(e)):
        return None
    found = [upper_bound(sympy.expand(e), dims) for e in limits]
    return max(abs(int(f or 0)) for f in found)


def always_below(index: Any, end: Any, sizes: Sizes) -> bool:
    limits = limits_of(index, sizes)
    return limits is not None and is_never_negative(end - 1 - limits[1], sizes)


def never_below(index: Any, end: Any, sizes: Sizes) -> bool:
    limits = limits_of(index, sizes)
    return is_never_negative(index - end, sizes) or (
        limits is not None and is_never_negative(limits[0] - end, sizes)
    )


def apply(op: Op, operands: Sequence[Element], limit: Limit) -> Element:
    """The result's element. Raises CasesError where it is not a function of positions."""
    if op.kind in _LOGIC:
        return _LOGIC[op.kind](*operands)
    if op.kind in _BOOLEAN and not any(isinstance(o, Cases) for o in operands):
        return _BOOLEAN[op.kind](*operands)
    if op.kind in _COMPARE:
        return _comparison(op, operands, limit)
    if op.kind == "where":
        return choose(*operands)
    if op.kind == "cast":
        return _cast(operands[0], DType(op.attr("dtype")), limit)
    if op.kind == "clamp":
        return _clamp(op, operands[0])
    if _dtype(op) is DType.BOOL or (op.kind == "div" and not _dtype(op).is_float):
        raise CasesError(f"of {_dtype(op)} cannot be followed")
    return combine(_NUMERIC[op.kind], *(_as_cases(o) for o in operands))


def _as_cases(element: Element) -> Cases:
    return element if isinstance(element, Cases) else as_number(element)


def _comparison(op: Op, operands: Sequence[Element], limit: Limit) -> Element:
    x, y = operands
    if not isinstance(x, Cases) or not isinstance(y, Cases):
        x, y = _as_cases(x), _as_cases(y)
    is_float = _dtype(op).is_float
    if op.kind in ("eq", "ne") and op.args[0] == op.args[1]:  # a score is a number
        return sympy.sympify(op.kind == "eq")
    if not all(leaf.is_infinite for leaf, _ in y.items):  # and a finite one
        for leaf, _ in (*x.items, *y.items):
            _check_comparable(leaf, is_float, limit)
    return compare(partial(_compared, op.kind), x, y)


def _compared(kind: str, a: Any, b: Any) -> Any:
    """A comparison; beside integers a fraction is rounded to the integer that gives the same."""
    if _is_fraction(a) and not _is_fraction(b):
        return _compared(_MIRRORED.get(kind, kind), b, a)
    if not _is_fraction(b) or not a.free_symbols:
        return _COMPARE[kind](a, b)
    below = sympy.Integer(math.floor(b))
    if kind in ("lt", "le"):
        return sympy.Le(a, below)
    return sympy.Gt(a, below) if kind in ("gt", "ge") else sympy.sympify(kind == "ne")


def _is_fraction(leaf: Any) -> bool:
    return isinstance(leaf, sympy.Rational) and not isinstance(leaf, sympy.Integer)


def _dtype(op: Op) -> DType:
    return next(a.type.dtype for a in op.args if isinstance(a, Value | Weight) and isinstance(a.type, Tensor))


def _check_comparable(leaf: Any, is_float: bool, limit: Limit) -> None:
    """Positions and numbers only, and rounding cannot change what a comparison gives."""
    if not leaf.free_symbols:
        return
    if not all(s.is_integer for s in leaf.free_symbols):
        raise CasesError("compares something that is computed from the tokens")
    if not leaf.is_integer:
        raise CasesError(f"compares {leaf}, a fraction of positions, which floating point rounds")
    most = limit(leaf)
    if (most is None and is_float) or (most is not None and most > (EXACT_F32 if is_float else EXACT_INT)):
        raise CasesError(f"compares {leaf}, which may not be exact")


def _cast(x: Element, dtype: DType, limit: Limit) -> Element:
    if dtype is DType.BOOL:
        return compare(sympy.Ne, x, Cases(((sympy.Integer(0), sympy.true),))) if isinstance(x, Cases) else x
    found = _as_cases(x)
    for leaf, _ in found.items:
        _check_cast(leaf, dtype, limit)
    return combine(_truncated, found) if dtype.is_integer else found


def _check_cast(leaf: Any, dtype: DType, limit: Limit) -> None:
    if not leaf.free_symbols:
        return
    if dtype in (DType.I8, DType.U8):
        raise CasesError(f"cuts positions ({leaf}) to {dtype}")
    if dtype.is_integer and not leaf.is_integer:
        raise CasesError(f"cuts {leaf} to an integer")
    if leaf.is_integer and dtype in (DType.F16, DType.BF16):
        most = limit(leaf)
        if most is None or most > (2**11 if dtype is DType.F16 else 2**8):
            raise CasesError(f"rounds positions ({leaf}) to {dtype}")


def _truncated(leaf: Any) -> Any:
    return sympy.Integer(int(leaf)) if leaf.is_Number and leaf.is_finite else leaf


def _clamp(op: Op, x: Element) -> Cases:
    found = _as_cases(x)
    low, high = op.attr("low"), op.attr("high")
    if low is not None:
        found = combine(_maximum, found, always(exact(low)))
    return found if high is None else combine(_minimum, found, always(exact(high)))


def _ordinary(leaf: Any) -> bool:
    """Made of numbers and positions alone."""
    return all(s.is_integer for s in leaf.free_symbols)


def _maximum(a: Any, b: Any) -> Any:
    """A floor far below any score changes none that counts."""
    if _ordinary(a) and _ordinary(b):
        return sympy.Max(a, b)
    for x, y in ((a, b), (b, a)):
        if not x.free_symbols and x <= VERY_LOW:
            return y
    raise CasesError("bounds a score from below")


def _minimum(a: Any, b: Any) -> Any:
    if _ordinary(a) and _ordinary(b):
        return sympy.Min(a, b)
    raise CasesError("bounds a score from above")


def _integers(a: Any, b: Any) -> None:
    if not (a.is_integer and b.is_Integer and b > 0):
        raise CasesError(
            f"divides {a} by {b}: only integers made from positions by a positive constant can be followed"
        )


def _floordiv(a: Any, b: Any) -> Any:
    _integers(a, b)
    return FloorDiv(a, b)


def _mod(a: Any, b: Any) -> Any:
    _integers(a, b)
    return sympy.Mod(a, b)


def _floor(a: Any) -> Any:
    """Of a fraction of positions, exact in single precision for small divisors."""
    if a.is_integer:
        return a
    if a.is_Rational:
        return sympy.Integer(math.floor(a))
    whole, divisor = sympy.together(a).as_numer_denom()
    if not _ordinary(a) or not divisor.is_Integer or divisor > LARGEST_DIVISOR:
        raise CasesError(f"rounds {a} down")
    return FloorDiv(sympy.expand(whole), divisor)


def _add(a: Any, b: Any) -> Any:
    return a + b


def _sub(a: Any, b: Any) -> Any:
    return a - b


def _mul(a: Any, b: Any) -> Any:
    return sympy.expand(a * b)


def _neg(a: Any) -> Any:
    return -a


def _abs(a: Any) -> Any:
    if not _ordinary(a):
        raise CasesError("takes the size of a score")
    return abs(a) if not a.free_symbols else sympy.Max(a, -a)


def _div(a: Any, b: Any) -> Any:
    if b.free_symbols or not b.is_finite or b == 0:
        raise CasesError(f"divides by {b}")
    return a / b


def _pow(a: Any, b: Any) -> Any:
    """A positive number, or a head's, to the power of positions is one of e."""
    if b.is_Integer and b >= 0:
        return sympy.expand(a**b)
    if b.free_symbols and _ordinary(b) and a.is_Rational and a > 0:
        return sympy.exp(sympy.expand(b * exact(math.log(a))))
    return _constant(math.pow)(a, b)


def _exp(a: Any) -> Any:
    return sympy.exp(sympy.expand(a)) if a.free_symbols else _constant(math.exp)(a)


def _tanh(a: Any) -> Any:
    return sympy.tanh(a) if a.free_symbols else _constant(math.tanh)(a)


def _constant(fn: Callable[..., float]) -> Callable[..., Any]:
    """fn on numbers; of anything else it is not followed."""

    def apply_to(*args: Any) -> Any:
        if any(a.free_symbols for a in args):
            raise CasesError(f"takes {fn.__name__} of {', '.join(str(a) for a in args)}")
        return exact(fn(*(float(a) for a in args)))

    return apply_to


def log(x: float) -> float:
    return -math.inf if x == 0 else math.log(x)


def rsqrt(x: float) -> float:
    return 1 / math.sqrt(x)


_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "lt": sympy.Lt, "le": sympy.Le, "gt": sympy.Gt, "ge": sympy.Ge, "eq": sympy.Eq, "ne": sympy.Ne,
}  # fmt: skip

_MIRRORED = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}

_BOOLEAN: dict[str, Callable[..., Any]] = {"mul": And, "minimum": And, "add": Or, "maximum": Or}

_LOGIC: dict[str, Callable[..., Any]] = {"and": And, "or": Or, "not": negation}

_NUMERIC: dict[str, Callable[..., Any]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "pow": _pow,
    "neg": _neg,
    "abs": _abs,
    "maximum": _maximum,
    "minimum": _minimum,
    "floordiv": _floordiv,
    "mod": _mod,
    "floor": _floor,
    "tanh": _tanh,
    "exp": _exp,
    "log": _constant(log),
    "sqrt": _constant(math.sqrt),
    "rsqrt": _constant(rsqrt),
}

KINDS = frozenset({*_COMPARE, *_LOGIC, *_NUMERIC, "where", "cast", "clamp"})
