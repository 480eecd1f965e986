"""Converters of ONNX's products, norms and softmax, and of those of onnxruntime."""

from __future__ import annotations

from typing import Any

from compiler.importers.onnx.context import Context, Convert, Held
from compiler.importers.onnx.shape import transpose
from compiler.importers.refused import ImportRefused
from ir.graph import Scalar
from ir.types import DType


def product(c: Context, x: Held, y: Held) -> Any:
    """x @ y: a linear of the transpose where y is a matrix of weights, a plain product where the inner axis
    has one element (rotary frequencies times positions)."""
    if c.rank(x) < 2 or c.rank(y) < 2:
        raise ImportRefused("products with vectors have no op", todo="Give them an axis of 1")
    x, y = c.tensor(x), c.tensor(y)
    if c.is_constant(y) and c.rank(y) == 2 and not c.is_constant(x):
        return c.op("linear", x, c.op("transpose", y, perm=(1, 0)))
    if c.shape(x)[-1] == 1:
        return c.op("mul", x, y)
    return c.op("matmul", x, y)


def _gemm(
    c: Context,
    x: Held,
    w: Held,
    bias: Held | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    transA: int = 0,
    transB: int = 0,
) -> Any:
    """alpha * x @ w + beta * bias of matrices."""
    if transA:
        x = transpose(c, x)
    x, w = c.tensor(x), c.tensor(w)
    fits = bias is None or c.shape(bias) == (c.shape(w)[0 if transB else 1],)
    if alpha == 1 and beta == 1 and c.is_constant(w) and fits:
        rows = w if transB else c.op("transpose", w, perm=(1, 0))
        return c.op("linear", x, rows, None if bias is None else c.tensor(bias))
    found = product(c, x, transpose(c, w) if transB else w)
    found = found if alpha == 1 else c.op("mul", found, Scalar(float(alpha)))
    if bias is None:
        return found
    added = c.tensor(bias) if beta == 1 else c.op("mul", c.tensor(bias), Scalar(float(beta)))
    return c.op("add", found, added)


def _fused_matmul(
    c: Context, x: Held, y: Held, *, alpha: float = 1.0, transA: int = 0, transB: int = 0, **others: int
) -> Any:
    if any(others.values()):
        raise ImportRefused(f"with {sorted(others)} it has no op")
    x = _swapped(c, x) if transA else x
    y = _swapped(c, y) if transB else y
    found = product(c, x, y)
    return found if alpha == 1 else c.op("mul", found, Scalar(float(alpha)))


def _swapped(c: Context, x: Held) -> Held:
    rank = c.rank(x)
    return transpose(c, x, perm=(*range(rank - 2), rank - 1, rank - 2))


def _softmax(c: Context, x: Held, *, axis: int | None = None) -> Any:
    """Before op set 13 it is over all axes from `axis` on."""
    number = c.axis(x, axis if axis is not None else (-1 if c.opset >= 13 else 1))
    if c.opset < 13 and number != c.rank(x) - 1:
        raise ImportRefused("a softmax over several axes has no op")
    return c.op("softmax", c.tensor(x), axis=number)


def _rank_from(c: Context, x: Held, axis: int) -> int | None:
    """How many of the last axes a norm is over, None for one."""
    count = c.rank(x) - c.axis(x, axis)
    return None if count == 1 else count


def rms_norm(
    c: Context, x: Held, w: Held | None = None, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Any:
    wide = _with_heads(c, c.tensor(x), axis)
    made = c.op("rms_norm", wide, _operand(c, w), eps=float(epsilon), rank=_rank_from(c, x, axis))
    return c.reshape(made, c.shape(x))


def layer_norm(
    c: Context,
    x: Held,
    w: Held | None = None,
    b: Held | None = None,
    *,
    axis: int = -1,
    epsilon: float = 1e-5,
    stash_type: int = 1,
) -> Any:
    """Three results, of which models use the first."""
    operands = (_with_heads(c, c.tensor(x), axis), _operand(c, w), _operand(c, b))
    made = c.op("layer_norm", *operands, eps=float(epsilon), rank=_rank_from(c, x, axis))
    return (c.reshape(made, c.shape(x)), None, None)


def _with_heads(c: Context, x: Any, axis: int) -> Any:
    """[1,S,H,D] of what is normed as [1,S*H,D]: tokens stay an axis of their own."""
    made, size = c.maker(x), c.shape(x)[-1]
    if made is None or made.kind != "reshape" or _rank_from(c, x, axis) is not None:
        return x
    *outer, width = c.shape(made.args[0])
    if not isinstance(width, int) or not isinstance(size, int) or width == size or width % size:
        return x
    shape = (*outer, width // size, size)
    return x if shape == c.shape(x) else c.reshape(made.args[0], shape)


def _operand(c: Context, x: Held | None) -> Any:
    return None if x is None else c.tensor(x, DType.F32)


def _skip(norm: Convert) -> Convert:
    """A norm of a sum: results are the norm, two that are not read, and the sum."""

    def convert(c: Context, x: Held, skip: Held, *weights: Held | None, epsilon: float = 1e-12) -> Any:
        takes = 1 if norm is rms_norm else 2
        total = c.op("add", c.tensor(x), c.tensor(skip))
        bias = weights[takes] if len(weights) > takes else None
        total = total if bias is None else c.op("add", total, c.tensor(bias))
        made = norm(c, total, *weights[:takes], epsilon=epsilon)
        return (made if norm is rms_norm else made[0], None, None, total)

    return convert


TABLE: dict[str, Convert] = {
    "MatMul": product,
    "Gemm": _gemm,
    "Softmax": _softmax,
    "LayerNormalization": layer_norm,
    "RMSNormalization": rms_norm,
    "SimplifiedLayerNormalization": rms_norm,
    "com.microsoft.SimplifiedLayerNormalization": rms_norm,
    "com.microsoft.SkipSimplifiedLayerNormalization": _skip(rms_norm),
    "com.microsoft.SkipLayerNormalization": _skip(layer_norm),
    "com.microsoft.FusedMatMul": _fused_matmul,
}
