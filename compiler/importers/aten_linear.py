"""Converters of ATen's reductions, products, norms, convolution and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from compiler.importers.context import Context
from compiler.importers.experts import convert_moe_linear
from compiler.importers.recurrences import convert_recurrence
from compiler.importers.refused import ImportRefused
from ir.dims import product
from ir.predicates import CAUSAL, window
from ir.types import DType

Convert = Callable[..., Any]
MAX_MATRICES = 16  # of a product that becomes so many linears


def _axes(c: Context, x: Any, axes: Any) -> tuple[int, ...]:
    if axes is None or axes == []:
        return tuple(range(c.type(x).rank))
    return tuple(sorted(c.axis(x, a) for a in (axes if isinstance(axes, list) else [axes])))


def _reduction(kind: str) -> Convert:
    def convert(c: Context, x: Any, axes: Any = None, keepdim: bool = False, **_: Any) -> Any:
        x = c.tensor(x, c.out.dtype)
        return c.op(kind, x, axes=_axes(c, x, axes), keepdims=keepdim)

    return convert


def _variance(root: bool) -> Convert:
    """The mean square of what is left without the mean; `root` for its root."""

    def convert(
        c: Context, x: Any, axes: Any = None, correction: Any = None, *, keepdim: bool = False, **_: Any
    ) -> Any:
        x = c.tensor(x, c.out.dtype)
        axes, less = _axes(c, x, axes), 1 if correction is None else correction
        centred = c.op("sub", x, c.op("mean", x, axes=axes, keepdims=True))
        found = c.op("mean", c.op("mul", centred, centred), axes=axes, keepdims=keepdim)
        if less:
            count = product(tuple(c.type(x).shape[axis] for axis in axes))
            if not isinstance(count, int) or count <= less:
                raise ImportRefused(f"a variance of {count} elements, corrected by {less}, has no op")
            found = c.op("mul", found, c.literal(count / (count - less), c.out.dtype))
        return c.op("sqrt", found) if root else found

    return convert


def _softmax(c: Context, x: Any, axis: int, *_: Any, **__: Any) -> Any:
    return c.op("softmax", c.tensor(x, c.out.dtype), axis=c.axis(x, axis))


def _cumsum(c: Context, x: Any, axis: int, **_: Any) -> Any:
    """Of the same number all along it is a count, which is how many models make positions from a mask of
    ones."""
    axis, dtype = c.axis(x, axis), c.out.dtype
    value = c.filled_with(x)
    if value is None:
        return c.op("cumsum", c.tensor(x, dtype), axis=axis)
    shape = c.type(x).shape
    count = c.op("add", c.op("iota", size=shape[axis], dtype="i32"), c.literal(1, DType.I32))
    count = c.reshape(count, (shape[axis], *(1,) * (len(shape) - axis - 1)))
    total = c.cast(count, dtype) if value == 1 else c.op("mul", c.cast(count, dtype), c.literal(value, dtype))
    return c.op("expand", total, shape=shape)


def _linear(c: Context, x: Any, w: Any, b: Any = None) -> Any:
    return c.op("linear", c.tensor(x), w, b)


def _product(c: Context, x: Any, y: Any) -> Any:
    """x @ y; where y is a matrix of weights it is a linear of its transpose."""
    if c.is_constant(y) and c.type(y).rank == 2 and not c.is_constant(x):
        return c.op("linear", x, c.op("transpose", y, perm=(1, 0)))
    if c.type(x).rank < 2 or c.type(y).rank < 2:
        raise ImportRefused("products with vectors have no op", todo="Give them an axis of 1")
    if c.is_constant(x) and not c.is_constant(y) and not isinstance(c.type(y).shape[-1], int):
        return _constant_first(c, x, y)
    return c.op("matmul", x, y)


def _constant_first(c: Context, x: Any, y: Any) -> Any:
    """x [..,M,K] of weights @ y [..,K,S]: a linear of y's columns for each matrix of x, if they are few."""
    (*before, rows, inner), (*lead, _, length) = c.type(x).shape, c.type(y).shape
    count, same = product(tuple(before)), c.out.shape[:-2] == tuple(lead)
    if (
        not isinstance(count, int)
        or not same
        or count not in (1, product(tuple(lead)))
        or count > MAX_MATRICES
    ):
        return c.op("matmul", x, y)
    order = (*range(len(lead)), len(lead) + 1, len(lead))
    columns = c.op("transpose", y, perm=order)
    if count == 1:
        return c.op("transpose", c.op("linear", columns, c.reshape(x, (rows, inner))), perm=order)
    w, columns = c.reshape(x, (count, rows, inner)), c.reshape(columns, (count, length, inner))
    found: list[Any] = []
    for i in range(count):
        own = (c.op("slice", each, axis=0, start=i, stop=i + 1) for each in (columns, w))
        found.append(c.op("linear", next(own), c.reshape(next(own), (rows, inner))))
    joined = c.op("transpose", c.op("concat", *found, axis=0), perm=(0, 2, 1))
    return c.reshape(joined, (*lead, rows, length))


def _addmm(c: Context, bias: Any, x: Any, w: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    """bias + x @ w."""
    if alpha == 1 and beta == 1 and c.is_constant(w) and c.type(bias).shape == c.out.shape[-1:]:
        return c.op("linear", x, c.op("transpose", w, perm=(1, 0)), bias)
    dtype = c.out.dtype
    product = _product(c, x, w)
    product = product if alpha == 1 else c.op("mul", product, c.operand(alpha, dtype))
    bias = bias if beta == 1 else c.op("mul", bias, c.operand(beta, dtype))
    return c.op("add", bias, product)


def _layer_norm(
    c: Context, x: Any, shape: Any, w: Any = None, b: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    return c.op("layer_norm", x, w, b, eps=float(eps), rank=None if len(shape) == 1 else len(shape))


def _native_layer_norm(c: Context, x: Any, shape: Any, w: Any, b: Any, eps: float) -> Any:
    """Three results, of which models use the first."""
    return (_layer_norm(c, x, shape, w, b, eps), None, None)


def _group_norm(
    c: Context, x: Any, groups: int, w: Any = None, b: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    """[N,C,..] with C in groups, each normed with all that comes after it; w and b [C]."""
    x = c.tensor(x)
    sizes = c.type(x).shape
    channels = cast(int, sizes[1])
    parts = c.reshape(x, (sizes[0], groups, product((channels // groups, *sizes[2:]))))
    found = c.reshape(c.op("layer_norm", parts, None, None, eps=float(eps), rank=None), sizes)
    for kind, arg in (("mul", w), ("add", b)):
        if arg is not None:
            found = c.op(kind, found, c.reshape(arg, (channels, *(1,) * (len(sizes) - 2))))
    return found


def _rms_norm(c: Context, x: Any, shape: Any, w: Any = None, eps: float | None = None) -> Any:
    """Without an eps torch takes the element type's machine epsilon."""
    eps = 2.0**-23 if eps is None else float(eps)
    return c.op("rms_norm", x, w, eps=eps, rank=None if len(shape) == 1 else len(shape))


def _conv1d(
    c: Context,
    x: Any,
    w: Any,
    b: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    stride, padding, dilation = ([v] if isinstance(v, int) else list(v) for v in (stride, padding, dilation))
    if stride != [1]:
        raise ImportRefused(f"a convolution with stride {stride} has no op", todo="Use 1")
    groups_, dilation_ = (None if n == 1 else n for n in (groups, dilation[0]))
    return c.op("conv1d", x, w, b, padding=padding[0] or None, groups=groups_, dilation=dilation_)


def _convolution(
    c: Context,
    x: Any,
    w: Any,
    b: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    _: Any,
    groups: int,
) -> Any:
    if transposed or c.type(x).rank != 3:
        raise ImportRefused("a convolution of more than one dimension, or transposed, has no op")
    return _conv1d(c, x, w, b, stride, padding, dilation, groups)


def _marker(
    c: Context,
    q: Any,
    k: Any,
    v: Any,
    mask: Any,
    sinks: Any,
    scale: float,
    softcap: float,
    causal: bool,
    size: int,
) -> Any:
    """octavo::attention: with a mask operand the mask alone decides, without one causal and the window do."""
    predicate = None
    if mask is None:
        predicate = _predicate(c, causal, size)
    return c.op(
        "attention", q, k, v, mask, sinks, scale=float(scale), mask=predicate, softcap=float(softcap) or None
    )


def _predicate(c: Context, causal: bool, size: int) -> Any:
    if not causal:
        return True
    return CAUSAL & window(size) if size else CAUSAL


def _sdpa(
    c: Context,
    q: Any,
    k: Any,
    v: Any,
    mask: Any = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch's scaled_dot_product_attention: [.., S, D] in, [.., S, E] out; scale 1/sqrt(D) unless given."""
    if dropout:
        raise ImportRefused(
            "attention with dropout cannot be compiled", todo="Export the module in eval mode"
        )
    width: Any = c.type(q).shape[-1]
    q, k, v = (_four_axes(c, x) for x in (q, k, v))
    out = c.op(
        "attention",
        q,
        k,
        v,
        None if mask is None else _mask_axes(c, mask),
        scale=width**-0.5 if scale is None else float(scale),
        mask=None if mask is not None else (CAUSAL if is_causal else True),
    )
    return c.reshape(c.op("transpose", out, perm=(0, 2, 1, 3)), c.out.shape)


def _four_axes(c: Context, x: Any) -> Any:
    """[N, S, D] as [1, N, S, D]: rows of a batch and heads are equally independent."""
    shape = c.type(x).shape
    return x if len(shape) == 4 else c.reshape(x, (*(1,) * (4 - len(shape)), *shape))


def _mask_axes(c: Context, mask: Any) -> Any:
    if c.type(mask).dtype is not DType.BOOL:
        mask = c.tensor(mask, c.out.dtype)
    return _four_axes(c, mask)


TABLE: dict[str, Convert] = {
    "aten.sum.dim_IntList": _reduction("sum"),
    "aten.sum.default": _reduction("sum"),
    "aten.mean.dim": _reduction("mean"),
    "aten.mean.default": _reduction("mean"),
    "aten.amax.default": _reduction("max"),
    "aten.var.correction": _variance(root=False),
    "aten.std.correction": _variance(root=True),
    "aten.softmax.int": _softmax,
    "aten._softmax.default": _softmax,
    "aten.cumsum.default": _cumsum,
    "aten.linear.default": _linear,
    "aten.matmul.default": _product,
    "aten.mm.default": _product,
    "aten.bmm.default": _product,
    "aten.addmm.default": _addmm,
    "aten.baddbmm.default": _addmm,
    "aten.layer_norm.default": _layer_norm,
    "aten.group_norm.default": _group_norm,
    "aten.native_layer_norm.default": _native_layer_norm,
    "aten.rms_norm.default": _rms_norm,
    "aten.conv1d.default": _conv1d,
    "aten.convolution.default": _convolution,
    "octavo.attention.default": _marker,
    "octavo.moe_linear.default": convert_moe_linear,
    "octavo.recurrence.default": convert_recurrence,
    "aten.scaled_dot_product_attention.default": _sdpa,
}
