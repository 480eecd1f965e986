"""Converters of ONNX's pointwise ops."""

from __future__ import annotations

from typing import Any

import numpy as np

from compiler.importers.onnx.context import Context, Convert, Held, Known
from compiler.importers.onnx.formula import Formula, broadcast, formula
from compiler.importers.onnx.shape import expand
from compiler.importers.onnx.tensors import computed, element_type
from compiler.importers.refused import ImportRefused
from ir.graph import Scalar
from ir.types import DType


def _same(kind: str) -> Convert:
    return lambda c, *args, **_: c.pointwise(kind, *args)


def _folding(kind: str) -> Convert:
    """Of any number of operands."""

    def convert(c: Context, first: Held, *others: Held) -> Held:
        for other in others:
            first = c.pointwise(kind, first, other)
        return first

    return convert


def _div(c: Context, x: Held, y: Held) -> Held:
    if c.dtype(x).is_float:
        return c.pointwise("div", x, y)
    if isinstance(x, Known) and isinstance(y, Known) and object not in (x.array.dtype, y.array.dtype):
        whole = np.abs(x.array) // np.maximum(np.abs(y.array), 1)
        return Known(whole * np.sign(x.array) * np.sign(y.array))
    return c.pointwise("floordiv", x, y)


def _mod(c: Context, x: Held, y: Held, *, fmod: int = 0) -> Held:
    if fmod and not (isinstance(x, Known) and isinstance(y, Known)):
        raise ImportRefused("with fmod it has no op")
    return c.pointwise("mod", x, y)


def _pow(c: Context, x: Held, y: Held) -> Held:
    if isinstance(y, Known) and c.dtype(x).is_float:
        y = Known(y.array.astype(np.float32))
    return c.pointwise("pow", x, y)


def _reciprocal(c: Context, x: Held) -> Held:
    if isinstance(x, Known):
        return c.folded("div", Known(np.array(1, np.float32)), x)
    return c.op("div", Scalar(1.0), c.tensor(x))


def _clip(c: Context, x: Held, low: Held | None = None, high: Held | None = None, **attrs: Any) -> Held:
    bounds = [
        None if b is None else c.known(b, "bound").reshape(-1)[0].item()
        for b in (low, high)
    ]  # fmt: skip
    bounds = [attrs.get(name, b) for name, b in zip(("min", "max"), bounds, strict=True)]
    if isinstance(x, Known) and x.array.dtype != object:
        return c.folded("clamp", x, low=bounds[0], high=bounds[1])
    if c.dtype(x).is_float:
        limits: dict[str, Any] = {n: _within(b) for n, b in zip(("low", "high"), bounds, strict=True)}
        return c.op("clamp", c.tensor(x), **limits) if any(v is not None for v in limits.values()) else x
    for kind, bound in zip(("maximum", "minimum"), bounds, strict=True):
        x = x if bound is None else c.pointwise(kind, x, Known(np.array(bound)))
    return x


def _within(bound: float | None) -> float | None:
    """None for what bounds no float."""
    return None if bound is None or abs(bound) > 3.4e38 else float(np.float32(bound))


def _cast(c: Context, x: Held, *, to: int, saturate: int = 1, **_: Any) -> Held:
    return cast(c, x, computed(element_type(to, "Cast")))


def _cast_like(c: Context, x: Held, like: Held, **_: Any) -> Held:
    return cast(c, x, c.dtype(like))


def cast(c: Context, x: Held, dtype: DType) -> Held:
    if isinstance(x, Known) and x.array.dtype == object:
        return x if dtype is DType.I32 else c.tensor(x, dtype)
    if isinstance(x, Known):
        wide = np.int64 if dtype is DType.I32 else dtype.numpy
        with np.errstate(all="ignore"):
            return Known(x.array != 0 if dtype is DType.BOOL else x.array.astype(wide))
    if isinstance(x, Formula) and dtype is DType.BOOL:
        return x if x.dtype is dtype else c.pointwise("truth", x)
    if isinstance(x, Formula) and dtype is DType.I32:
        if x.dtype is DType.I32:
            return x
        if x.expr.is_Boolean and x.is_constant and not x.expr.free_symbols:
            return formula(dtype, x.shape, int(bool(x.expr)))
    return c.tensor(x, dtype)


def _is_nan(c: Context, x: Held) -> Held:
    """A softmax has no NaN: a pass proves of each mask that every query sees a key."""
    made = c.maker(x)
    while made is not None and made.kind in ("cast", "reshape"):
        made = c.maker(made.args[0])
    if made is not None and made.kind == "softmax":
        return formula(DType.BOOL, c.shape(x), False)
    return c.pointwise("ne", x, x)


def _where(c: Context, condition: Held, x: Held, y: Held) -> Held:
    chosen = c.as_formula(condition)
    if chosen is not None and chosen.expr in (True, False):
        return _shaped(c, x if chosen.expr else y, condition, x, y)
    return c.pointwise("where", condition, x, y)


def _shaped(c: Context, chosen: Held, *operands: Held) -> Held:
    """What was chosen, in the shape of all together."""
    return expand(c, chosen, broadcast([c.shape(o) for o in operands]))


def _xor(c: Context, x: Held, y: Held) -> Held:
    return c.pointwise("ne", x, y)


def _gelu(c: Context, x: Held, *, approximate: str = "none") -> Held:
    return c.op("gelu_tanh" if approximate == "tanh" else "gelu", c.tensor(x))


def _fast_gelu(c: Context, x: Held, bias: Held | None = None) -> Held:
    return c.op("gelu_tanh", c.tensor(x if bias is None else c.pointwise("add", x, bias)))


def _bias_gelu(c: Context, x: Held, bias: Held) -> Held:
    return c.op("gelu", c.tensor(c.pointwise("add", x, bias)))


def _quick_gelu(c: Context, x: Held, *, alpha: float = 1.702) -> Held:
    """x * sigmoid(alpha * x); of a model whose alpha is 1, silu."""
    x = c.tensor(x)
    if alpha == 1.0:
        return c.op("silu", x)
    return c.op("mul", x, c.op("sigmoid", c.op("mul", x, Scalar(float(alpha)))))


def _leaky(c: Context, x: Held, *, alpha: float = 0.01) -> Held:
    x = c.tensor(x)
    return c.op("where", c.op("ge", x, Scalar(0.0)), x, c.op("mul", x, Scalar(float(alpha))))


def _sign_checked(kind: str) -> Convert:
    """An op of the IR that takes floats alone."""

    def convert(c: Context, x: Held, **_: Any) -> Held:
        if not c.dtype(x).is_float:
            raise ImportRefused(f"of {c.dtype(x)} it has no op")
        return c.pointwise(kind, x)

    return convert


_UNARY = {
    "Exp": "exp", "Log": "log", "Sqrt": "sqrt", "Tanh": "tanh", "Sin": "sin", "Cos": "cos", "Floor": "floor",
    "Sigmoid": "sigmoid", "Erf": "erf", "Relu": "relu", "Softplus": "softplus", "Swish": "silu",
}  # fmt: skip
_BINARY = {
    "Add": "add", "Sub": "sub", "Mul": "mul", "Equal": "eq", "Less": "lt", "LessOrEqual": "le",
    "Greater": "gt", "GreaterOrEqual": "ge", "And": "and", "Or": "or", "Not": "not", "Neg": "neg",
    "Abs": "abs",
}  # fmt: skip

TABLE: dict[str, Convert] = {
    **{name: _sign_checked(kind) for name, kind in _UNARY.items()},
    **{name: _same(kind) for name, kind in _BINARY.items()},
    "Max": _folding("maximum"),
    "Min": _folding("minimum"),
    "Sum": _folding("add"),
    "Div": _div,
    "Mod": _mod,
    "Pow": _pow,
    "Reciprocal": _reciprocal,
    "Clip": _clip,
    "Cast": _cast,
    "CastLike": _cast_like,
    "IsNaN": _is_nan,
    "Where": _where,
    "Xor": _xor,
    "Gelu": _gelu,
    "LeakyRelu": _leaky,
    "com.microsoft.Gelu": _gelu,
    "com.microsoft.FastGelu": _fast_gelu,
    "com.microsoft.BiasGelu": _bias_gelu,
    "com.microsoft.QuickGelu": _quick_gelu,
}
