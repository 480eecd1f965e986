"""Pointwise ops: each result element depends on the operand elements at the same place."""

from __future__ import annotations

from collections.abc import Callable
from math import erf
from typing import Any, cast

import numpy as np

from ir.ops.base import REQUIRED, Array, Call, Infer, OpDef, RefCall, Reference, broadcast, common_dtype, fits
from ir.types import DType, Tensor, Type

_erf: Callable[[Any], Any] = np.vectorize(erf, otypes=[np.float64])


def _shapes(call: Call) -> list[tuple[Any, ...]]:
    return [t.shape for t in call.types if isinstance(t, Tensor)]


def _same(call: Call) -> tuple[Type, ...]:
    return (Tensor(common_dtype(call), broadcast(call, _shapes(call))),)


def _arithmetic(call: Call) -> tuple[Type, ...]:
    if common_dtype(call) is DType.BOOL:
        call.fail("does not compute on bool operands: use and, or, not, or a cast")
    return _same(call)


def _float(call: Call) -> tuple[Type, ...]:
    call.floats()
    return _same(call)


def _compare(call: Call) -> tuple[Type, ...]:
    common_dtype(call)
    return (Tensor(DType.BOOL, broadcast(call, _shapes(call))),)


def _logic(call: Call) -> tuple[Type, ...]:
    if common_dtype(call) is not DType.BOOL:
        call.fail(f"needs bool operands, not {common_dtype(call)}")
    return _same(call)


def _where(call: Call) -> tuple[Type, ...]:
    if call.tensor(0).dtype is not DType.BOOL:
        call.fail("the condition must be bool")
    return (Tensor(common_dtype(call, 1), broadcast(call, _shapes(call))),)


def _cast(call: Call) -> tuple[Type, ...]:
    return (Tensor(call.dtype(), call.tensor(0).shape),)


def _clamp(call: Call) -> tuple[Type, ...]:
    x = call.tensor(0)
    if x.dtype is DType.BOOL:
        call.fail("does not compute on bool operands")
    for name in ("low", "high"):
        bound = call.attrs[name]
        if bound is not None and not (type(bound) in (int, float) and fits(bound, x.dtype)):
            call.fail(f"attribute {name}={bound!r} does not fit operands of type {x.dtype}")
    return (x,)


def _array_type(args: tuple[Any, ...]) -> Any:
    """The element type of the operands that are not literals."""
    return next(a.dtype for a in args if hasattr(a, "dtype"))


def _elementwise(fn: Callable[..., Any]) -> Reference:
    def reference(call: RefCall) -> tuple[Array]:
        return (np.asarray(fn(*call.args), dtype=_array_type(call.args)),)

    return reference


def _predicate(fn: Callable[..., Any]) -> Reference:
    return lambda call: (np.asarray(fn(*call.args), dtype=np.bool_),)


def _cast_reference(call: RefCall) -> tuple[Array]:
    """Casting to f32 keeps the float type that the interpreter computes in; narrower types really round."""
    to = DType(call.attrs["dtype"])
    x = call.args[0]
    if to in (DType.F32, DType.F64):
        return (x.astype(call.float_type if to is DType.F32 else np.float64),)
    if to.is_integer and np.issubdtype(x.dtype, np.floating):
        x = np.trunc(x)
    return (x.astype(to.numpy),)


def _where_reference(call: RefCall) -> tuple[Array]:
    cond, x, y = call.args
    chosen = cast(Any, np.where(cond, x, y))
    return (chosen.astype(_array_type((x, y))),)


def _clamp_reference(call: RefCall) -> tuple[Array]:
    x, low, high = call.args[0], call.attrs["low"], call.attrs["high"]
    x = x if low is None else np.maximum(x, low)
    return (np.asarray(x if high is None else np.minimum(x, high), dtype=call.args[0].dtype),)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x)) without overflow."""
    e = np.exp(-np.abs(x))
    positive: Any = np.asarray(x) >= 0
    return cast(Any, np.where(positive, 1 / (1 + e), e / (1 + e)))


def gelu(x: Any) -> Any:
    """x * Phi(x) with the error function (arXiv 1606.08415)."""
    return x * 0.5 * (1 + _erf(np.asarray(x, np.float64) / np.sqrt(2)))


def gelu_tanh(x: Any) -> Any:
    """The tanh approximation of gelu (arXiv 1606.08415)."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def _softplus(x: Any) -> Any:
    return np.logaddexp(x, 0)


def _rsqrt(x: Any) -> Any:
    return 1 / np.sqrt(x)


def _binary(kind: str, fn: Callable[..., Any], infer: Infer = _arithmetic) -> OpDef:
    return OpDef(kind, ("x", "y"), infer, _elementwise(fn), pointwise=True)


def _unary(kind: str, fn: Callable[..., Any]) -> OpDef:
    return OpDef(kind, ("x",), _float, _elementwise(fn), pointwise=True)


def _comparison(kind: str, fn: Callable[..., Any]) -> OpDef:
    return OpDef(kind, ("x", "y"), _compare, _predicate(fn), pointwise=True)


ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x * sigmoid(x),
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "sigmoid": sigmoid,
    "tanh": np.tanh,
}

OPS: tuple[OpDef, ...] = (
    _binary("add", np.add),
    _binary("sub", np.subtract),
    _binary("mul", np.multiply),
    _binary("div", np.divide, _float),
    _binary("pow", np.power),
    _binary("maximum", np.maximum, _same),
    _binary("minimum", np.minimum, _same),
    _binary("floordiv", np.floor_divide),
    _binary("mod", np.mod),
    _comparison("lt", np.less),
    _comparison("le", np.less_equal),
    _comparison("gt", np.greater),
    _comparison("ge", np.greater_equal),
    _comparison("eq", np.equal),
    _comparison("ne", np.not_equal),
    OpDef("and", ("x", "y"), _logic, _predicate(np.logical_and), pointwise=True),
    OpDef("or", ("x", "y"), _logic, _predicate(np.logical_or), pointwise=True),
    OpDef("not", ("x",), _logic, _predicate(np.logical_not), pointwise=True),
    OpDef("neg", ("x",), _arithmetic, _elementwise(np.negative), pointwise=True),
    OpDef("abs", ("x",), _arithmetic, _elementwise(np.abs), pointwise=True),
    _unary("exp", np.exp),
    _unary("log", np.log),
    _unary("sqrt", np.sqrt),
    _unary("rsqrt", _rsqrt),
    _unary("tanh", np.tanh),
    _unary("sin", np.sin),
    _unary("cos", np.cos),
    _unary("sigmoid", sigmoid),
    _unary("erf", _erf),
    _unary("relu", ACTIVATIONS["relu"]),
    _unary("silu", ACTIVATIONS["silu"]),
    _unary("gelu", gelu),
    _unary("gelu_tanh", gelu_tanh),
    _unary("softplus", _softplus),
    _unary("floor", np.floor),
    OpDef("where", ("cond", "x", "y"), _where, _where_reference, pointwise=True),
    OpDef("cast", ("x",), _cast, _cast_reference, {"dtype": REQUIRED}, pointwise=True),
    OpDef("clamp", ("x",), _clamp, _clamp_reference, {"low": None, "high": None}, pointwise=True),
)
