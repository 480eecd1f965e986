"""Converters of ATen's pointwise ops, casts and constants."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from compiler.importers.context import Context, torch_dtype
from compiler.importers.refused import ImportRefused
from ir.types import DType

Convert = Callable[..., Any]


def _binary(kind: str) -> Convert:
    """Operands are promoted to the result's element type, as torch does."""

    def convert(c: Context, x: Any, y: Any, *, alpha: Any = 1) -> Any:
        dtype = c.out.dtype
        if alpha != 1:
            y = c.op("mul", c.tensor(y, dtype), c.operand(alpha, dtype))
        return c.op(kind, *c.operands([x, y], dtype))

    return convert


def _reversed_sub(c: Context, x: Any, y: Any, alpha: Any = 1) -> Any:
    return _binary("sub")(c, y, x, alpha=alpha)


def _logic(kind: str) -> Convert:
    def convert(c: Context, x: Any, y: Any) -> Any:
        if c.out.dtype is not DType.BOOL:
            raise ImportRefused("bitwise operations on integers have no op", todo="Use booleans")
        return c.op(kind, *c.operands([x, y], DType.BOOL))

    return convert


def _not(c: Context, x: Any) -> Any:
    if c.out.dtype is not DType.BOOL:
        raise ImportRefused("bitwise operations on integers have no op", todo="Use booleans")
    return c.op("not", c.tensor(x, DType.BOOL))


def _comparison(kind: str) -> Convert:
    def convert(c: Context, x: Any, y: Any) -> Any:
        return c.op(kind, *c.operands([x, y], _common(c, x, y)))

    return convert


def _common(c: Context, x: Any, y: Any) -> DType:
    """The element type in which two operands are compared: torch's promotion."""
    given = [a for a in c.node.args[:2] if hasattr(a, "meta")]
    fakes = [a.meta["val"] if hasattr(a, "meta") else a for a in c.node.args[:2]]
    if len(given) == 2 and all(hasattr(f, "dtype") for f in fakes):
        return torch_dtype(_promote(fakes[0], fakes[1]))
    types = [c.type(a).dtype for a in (x, y) if hasattr(a, "type")]
    literals = [a for a in (x, y) if isinstance(a, float)]
    dtype = types[0] if types else DType.I32
    return DType.F32 if literals and not dtype.is_float else dtype


def _promote(x: Any, y: Any) -> Any:
    import torch

    return torch.result_type(x, y)


def _unary(kind: str) -> Convert:
    def convert(c: Context, x: Any) -> Any:
        return c.op(kind, c.tensor(x, c.out.dtype))

    return convert


def _gelu(c: Context, x: Any, *, approximate: str = "none") -> Any:
    return c.op("gelu" if approximate == "none" else "gelu_tanh", c.tensor(x))


def _log1p(c: Context, x: Any) -> Any:
    """log(u) * x / (u - 1) with u = 1 + x as it is rounded (Kahan); x itself where that is 1."""
    dtype = c.out.dtype
    x, one = c.tensor(x, dtype), c.literal(1, dtype)
    u = c.op("add", x, one)
    rounded = c.op("sub", u, one)
    itself = c.op("or", c.op("eq", rounded, c.literal(0, dtype)), c.op("eq", u, c.literal(inf, dtype)))
    ratio = c.op("div", x, c.op("where", itself, one, rounded))
    return c.op("where", itself, x, c.op("mul", c.op("log", u), ratio))


def _expm1(c: Context, x: Any) -> Any:
    """exp(x) - 1 as tanh(x/2) (exp(x) + 1), which is exact near 0 too."""
    x, dtype = c.tensor(x, c.out.dtype), c.out.dtype
    half = c.op("tanh", c.op("mul", x, c.literal(0.5, dtype)))
    return c.op("mul", half, c.op("add", c.op("exp", x), c.literal(1, dtype)))


def _ceil(c: Context, x: Any) -> Any:
    return c.op("neg", c.op("floor", c.op("neg", c.tensor(x, c.out.dtype))))


def _erfinv(c: Context, x: Any) -> Any:
    """Of a constant alone, such as the quantile of a normal distribution at a fixed share."""
    import torch

    value = c.filled_with(x)
    if value is None:
        raise ImportRefused("erfinv of what is not constant has no op", todo="Compute it once, as a weight")
    found = torch.erfinv(torch.tensor(float(value), dtype=torch.float32)).item()
    return c.op("full", shape=c.out.shape, value=found, dtype=str(c.out.dtype))


def _softplus(c: Context, x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    """torch returns x itself above the threshold; from 20 on log(1 + exp(x)) is x in float32."""
    if beta != 1 or threshold < 20:
        raise ImportRefused(
            f"softplus with beta={beta}, threshold={threshold} has no op", todo="Use the defaults"
        )
    return c.op("softplus", c.tensor(x))


def _div_mode(c: Context, x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    if rounding_mode is None:
        return _binary("div")(c, x, y)
    if rounding_mode != "floor":
        raise ImportRefused(f"division with rounding_mode={rounding_mode!r} has no op", todo="Use 'floor'")
    return _binary("floordiv")(c, x, y)


def _reciprocal(c: Context, x: Any) -> Any:
    return c.op("div", c.operand(1.0, c.out.dtype), c.tensor(x, c.out.dtype))


def _nan_to_num(c: Context, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    import torch

    x, dtype = c.tensor(x, c.out.dtype), c.out.dtype
    if not dtype.is_float:
        return x
    most = torch.finfo(c.node.args[0].meta["val"].dtype).max
    given = {inf: most if posinf is None else posinf, -inf: -most if neginf is None else neginf}
    found = x
    for infinite, number in given.items():
        found = c.op("where", c.op("eq", x, c.literal(infinite, dtype)), c.literal(number, dtype), found)
    return c.op("where", c.op("ne", x, x), c.literal(nan or 0.0, dtype), found)


def _where(c: Context, cond: Any, x: Any, y: Any) -> Any:
    return c.op("where", c.tensor(cond, DType.BOOL), *c.operands([x, y], c.out.dtype))


def _masked_fill(c: Context, x: Any, mask: Any, value: Any) -> Any:
    return c.op("where", c.tensor(mask, DType.BOOL), c.operand(value, c.out.dtype), c.tensor(x))


def _clamp(c: Context, x: Any, low: Any = None, high: Any = None) -> Any:
    dtype = c.out.dtype
    bounds = [None if b is None else c.literal(b, dtype).value for b in (low, high)]
    return c.op("clamp", c.tensor(x, dtype), low=bounds[0], high=bounds[1])


def _clamp_between(c: Context, x: Any, low: Any = None, high: Any = None) -> Any:
    """Bounds for each element. The result is high where the bounds cross."""
    for kind, bound in (("maximum", low), ("minimum", high)):
        x = x if bound is None else c.op(kind, c.tensor(x, c.out.dtype), c.operand(bound, c.out.dtype))
    return x


def _clamp_max(c: Context, x: Any, high: Any) -> Any:
    return _clamp(c, x, None, high)


def _copy(c: Context, x: Any, *_: Any, **__: Any) -> Any:
    """A copy is the value itself, in the result's element type."""
    return c.tensor(x, c.out.dtype)


def _dropout(c: Context, x: Any, rate: float, train: bool) -> Any:
    if train and rate:
        raise ImportRefused("dropout is active", todo="Export the module in eval mode")
    return x


def _full(c: Context, shape: Any, value: Any, **_: Any) -> Any:
    dtype = c.out.dtype
    if not isinstance(value, bool | int | float):
        return c.op("expand", c.tensor(value, dtype), shape=c.out.shape)
    return c.op("full", shape=c.out.shape, value=c.literal(value, dtype).value, dtype=str(dtype))


def _filled(value: bool | int | float) -> Convert:
    return lambda c, *_, **__: _full(c, None, value)


def _new_full(c: Context, x: Any, shape: Any, value: Any, **_: Any) -> Any:
    return _full(c, shape, value)


def _full_like(c: Context, x: Any, value: Any, **_: Any) -> Any:
    return _full(c, None, value)


def _arange(c: Context, *args: Any, **_: Any) -> Any:
    """start, stop, step over an iota of the result's length."""
    start, step = (0 if len(args) == 1 else args[0]), (args[2] if len(args) > 2 else 1)
    dtype = c.out.dtype
    counts = c.op("iota", size=c.out.shape[0], dtype="i32")
    value = c.cast(counts, dtype)
    value = value if step == 1 else c.op("mul", value, c.operand(step, dtype))
    return value if start == 0 else c.op("add", value, c.operand(start, dtype))


def _scalar_tensor(c: Context, value: Any, **_: Any) -> Any:
    return c.tensor(value, c.out.dtype)


def _copied(c: Context, x: Any, source: Any, *_: Any) -> Any:
    """x.copy_(source): source in x's element type and shape."""
    value = c.tensor(source, c.out.dtype)
    return value if c.type(value).shape == c.out.shape else c.op("expand", value, shape=c.out.shape)


def _square(c: Context, x: Any) -> Any:
    return c.op("mul", c.tensor(x), c.tensor(x))


TABLE: dict[str, Convert] = {
    "aten.add.Tensor": _binary("add"),
    "aten.add.Scalar": _binary("add"),
    "aten.sub.Tensor": _binary("sub"),
    "aten.sub.Scalar": _binary("sub"),
    "aten.rsub.Scalar": _reversed_sub,
    "aten.rsub.Tensor": _reversed_sub,
    "aten.mul.Tensor": _binary("mul"),
    "aten.mul.Scalar": _binary("mul"),
    "aten.div.Tensor": _binary("div"),
    "aten.div.Scalar": _binary("div"),
    "aten.true_divide.Tensor": _binary("div"),
    "aten.div.Tensor_mode": _div_mode,
    "aten.div.Scalar_mode": _div_mode,
    "aten.floor_divide.default": _binary("floordiv"),
    "aten.remainder.Scalar": _binary("mod"),
    "aten.remainder.Tensor": _binary("mod"),
    "aten.pow.Tensor_Scalar": _binary("pow"),
    "aten.pow.Tensor_Tensor": _binary("pow"),
    "aten.pow.Scalar": _binary("pow"),
    "aten.maximum.default": _binary("maximum"),
    "aten.minimum.default": _binary("minimum"),
    "aten.lt.Tensor": _comparison("lt"),
    "aten.lt.Scalar": _comparison("lt"),
    "aten.le.Tensor": _comparison("le"),
    "aten.le.Scalar": _comparison("le"),
    "aten.gt.Tensor": _comparison("gt"),
    "aten.gt.Scalar": _comparison("gt"),
    "aten.ge.Tensor": _comparison("ge"),
    "aten.ge.Scalar": _comparison("ge"),
    "aten.eq.Tensor": _comparison("eq"),
    "aten.eq.Scalar": _comparison("eq"),
    "aten.ne.Tensor": _comparison("ne"),
    "aten.ne.Scalar": _comparison("ne"),
    "aten.logical_and.default": _logic("and"),
    "aten.logical_or.default": _logic("or"),
    "aten.bitwise_and.Tensor": _logic("and"),
    "aten.bitwise_or.Tensor": _logic("or"),
    "aten.__and__.Tensor": _logic("and"),
    "aten.__or__.Tensor": _logic("or"),
    "aten.logical_not.default": _not,
    "aten.bitwise_not.default": _not,
    "aten.neg.default": _unary("neg"),
    "aten.abs.default": _unary("abs"),
    "aten.exp.default": _unary("exp"),
    "aten.expm1.default": _expm1,
    "aten.log1p.default": _log1p,
    "aten.log.default": _unary("log"),
    "aten.sqrt.default": _unary("sqrt"),
    "aten.rsqrt.default": _unary("rsqrt"),
    "aten.tanh.default": _unary("tanh"),
    "aten.sin.default": _unary("sin"),
    "aten.cos.default": _unary("cos"),
    "aten.sigmoid.default": _unary("sigmoid"),
    "aten.erf.default": _unary("erf"),
    "aten.erfinv.default": _erfinv,
    "aten.relu.default": _unary("relu"),
    "aten.silu.default": _unary("silu"),
    "aten.floor.default": _unary("floor"),
    "aten.ceil.default": _ceil,
    "aten.gelu.default": _gelu,
    "aten.softplus.default": _softplus,
    "aten.reciprocal.default": _reciprocal,
    "aten.square.default": _square,
    "aten.where.self": _where,
    "aten.nan_to_num.default": _nan_to_num,
    "aten.where.ScalarOther": _where,
    "aten.where.ScalarSelf": _where,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.masked_fill.Tensor": _masked_fill,
    "aten.clamp.default": _clamp,
    "aten.clamp_min.default": _clamp,
    "aten.clamp_max.default": _clamp_max,
    "aten.clamp.Tensor": _clamp_between,
    "aten.clamp_min.Tensor": _clamp_between,
    "aten.clamp_max.Tensor": lambda c, x, high: _clamp_between(c, x, None, high),
    "aten._to_copy.default": _copy,
    "aten.to.dtype": _copy,
    "aten.to.device": _copy,
    "aten.to.dtype_layout": _copy,
    "aten.to.other": _copy,
    "aten.type_as.default": _copy,
    "aten.clone.default": _copy,
    "aten.alias.default": _copy,
    "aten.detach.default": _copy,
    "aten.detach_.default": _copy,
    "aten.contiguous.default": _copy,
    "aten.lift_fresh_copy.default": _copy,
    "aten.copy.default": _copied,
    "aten.dropout.default": _dropout,
    "aten.full.default": _full,
    "aten.full_like.default": _full_like,
    "aten.new_full.default": _new_full,
    "aten.fill.Scalar": _full_like,
    "aten.empty.memory_format": _filled(0),  # no model may depend on what it holds
    "aten.new_empty.default": _filled(0),
    "aten.empty_like.default": _filled(0),
    "aten.zeros.default": _filled(0),
    "aten.ones.default": _filled(1),
    "aten.zeros_like.default": _filled(0),
    "aten.ones_like.default": _filled(1),
    "aten.new_zeros.default": _filled(0),
    "aten.new_ones.default": _filled(1),
    "aten.arange.default": _arange,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.scalar_tensor.default": _scalar_tensor,
}
