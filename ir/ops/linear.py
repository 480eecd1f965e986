"""Embedding, matrix products, normalisation and rotary embedding: the ops that work on a row of features."""

from __future__ import annotations

from typing import Any

import numpy as np

from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall, broadcast
from ir.ops.pointwise import ACTIVATIONS
from ir.ops.reduce import mean
from ir.ops.shape import gather
from ir.types import Tensor, Type


def _embed(call: Call) -> tuple[Type, ...]:
    ids, w = call.tensor(0), call.tensor(1)
    if not ids.dtype.is_integer or w.rank != 2:
        call.fail("needs integer ids and a table [V,H]")
    dtype = w.dtype if call.attrs["dtype"] is None else call.dtype()
    return (Tensor(dtype, (*ids.shape, w.shape[1])),)


def _matmul(call: Call) -> tuple[Type, ...]:
    x, y = call.tensor(0), call.tensor(1)
    if x.rank < 2 or y.rank < 2 or x.shape[-1] != y.shape[-2]:
        call.fail(f"{list(x.shape)} and {list(y.shape)} do not multiply")
    batch = broadcast(call, [x.shape[:-2], y.shape[:-2]])
    return (Tensor(call.floats(), (*batch, x.shape[-2], y.shape[-1])),)


def check_floats(call: Call) -> None:
    """Operands may differ in float type: they are widened. The result has the first one's, or `dtype`."""
    for index, given in enumerate(call.types):
        if given is not None and not call.tensor(index).dtype.is_float:
            call.fail(f"operand {index} must be a float tensor, not {call.tensor(index).dtype}")


def _linear(call: Call) -> tuple[Type, ...]:
    check_floats(call)
    return linear_shape(call, call.tensor(0), call.tensor(1), call.optional(2), call.optional(3))


def linear_shape(
    call: Call, x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None
) -> tuple[Type, ...]:
    """The result of a linear whose matrix is [N,K], with the epilogue that its attributes describe."""
    gated, activation = call.flag("gated"), call.attrs["activation"]
    if w.rank != 2 or x.rank < 1 or x.shape[-1] != w.shape[1]:
        call.fail(f"x {list(x.shape)} and w {list(w.shape)} do not fit: w is [N,K]")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        call.fail(f"no activation {activation!r}; there are {sorted(ACTIVATIONS)}")
    outputs: Any = w.shape[0]
    if gated and (not isinstance(outputs, int) or outputs % 2):
        call.fail(f"gated needs an even number of outputs, not {outputs}")
    if bias is not None and bias.shape != (outputs,):
        call.fail(f"bias {list(bias.shape)} is not [{outputs}]")
    shape = (*x.shape[:-1], outputs // 2 if gated else outputs)
    if residual is not None and residual.shape != shape:
        call.fail(f"residual {list(residual.shape)} is not {list(shape)}")
    return (Tensor(call.float_dtype(x.dtype), shape),)


def _norm(call: Call) -> tuple[Type, ...]:
    x, rank = call.tensor(0), call.integer("rank", 1)
    call.number("eps")
    check_floats(call)
    if rank > x.rank:
        call.fail(f"rank {rank} is not in 1..{x.rank}")
    for index in range(1, len(call.types)):
        weight = call.optional(index)
        if weight is not None and broadcast(call, [x.shape, weight.shape]) != x.shape:
            call.fail(f"weight {list(weight.shape)} does not broadcast to {list(x.shape)}")
    return (Tensor(call.float_dtype(x.dtype), x.shape),)


def _rope(call: Call) -> tuple[Type, ...]:
    x, cos, sin, offset = call.tensor(0), call.tensor(1), call.tensor(2), call.integer("offset")
    call.flag("interleaved")
    check_floats(call)
    if x.rank < 1 or cos.rank < 1 or cos != sin:
        call.fail(f"x {list(x.shape)}, cos {list(cos.shape)} and sin {list(sin.shape)} do not fit")
    width, pairs = x.shape[-1], cos.shape[-1]
    if not isinstance(width, int) or not isinstance(pairs, int) or offset + 2 * pairs > width:
        call.fail(f"{pairs} pairs from {offset} do not fit a head of {width}")
    if broadcast(call, [x.shape[:-1], cos.shape[:-1]]) != x.shape[:-1]:
        call.fail(f"cos {list(cos.shape)} does not broadcast over {list(x.shape)}")
    return (x,)


def _embed_reference(call: RefCall) -> tuple[Array]:
    return (gather(call.args[1], call.args[0], 0),)


def linear_reference(call: RefCall) -> tuple[Array]:
    """Of x, w and, where given, bias and residual."""
    x, w, bias, residual = call.args[0], call.args[1], call.arg(2), call.arg(3)
    y = x @ np.asarray(w, dtype=x.dtype).T
    if bias is not None:
        y = y + np.asarray(bias, dtype=x.dtype)
    activate = ACTIVATIONS[call.attrs["activation"]]
    if call.attrs["gated"]:
        gate, up = np.split(y, 2, axis=-1)
        y = activate(gate) * up
    else:
        y = activate(y)
    y = y if residual is None else y + np.asarray(residual, dtype=x.dtype)
    return (np.asarray(y, dtype=x.dtype),)


def _scaled(call: RefCall, y: Any) -> tuple[Array]:
    dtype = call.args[0].dtype
    weight, bias = call.arg(1), call.arg(2)
    y = y if weight is None else y * np.asarray(weight, dtype=dtype)
    return (np.asarray(y if bias is None else y + np.asarray(bias, dtype=dtype), dtype=dtype),)


def _rms_norm_reference(call: RefCall) -> tuple[Array]:
    """x / sqrt(mean(x^2) + eps) * w (arXiv 1910.07467)."""
    x = call.args[0]
    axes = tuple(range(-call.attrs["rank"], 0))
    return _scaled(call, x / np.sqrt(mean(x * x, axes) + call.attrs["eps"]))


def _layer_norm_reference(call: RefCall) -> tuple[Array]:
    """(x - mean) / sqrt(var + eps) * w + b (arXiv 1607.06450)."""
    x = call.args[0]
    axes = tuple(range(-call.attrs["rank"], 0))
    centred = x - mean(x, axes)
    variance = mean(centred * centred, axes)
    return _scaled(call, centred / np.sqrt(variance + call.attrs["eps"]))


def _rope_reference(call: RefCall) -> tuple[Array]:
    """Rotary embedding (arXiv 2104.09864) of 2P elements from `offset`; the rest passes through."""
    x, cos, sin = call.args
    offset, pairs = call.attrs["offset"], cos.shape[-1]
    out = x.copy()
    if call.attrs["interleaved"]:
        a, b = slice(offset, offset + 2 * pairs, 2), slice(offset + 1, offset + 2 * pairs, 2)
    else:
        a, b = slice(offset, offset + pairs), slice(offset + pairs, offset + 2 * pairs)
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., b] * cos + x[..., a] * sin
    return (out,)


LINEAR_ATTRS = {"activation": "none", "gated": False, "dtype": None}
_NORM = {"eps": REQUIRED, "rank": 1, "dtype": None}

OPS: tuple[OpDef, ...] = (
    OpDef("embed", ("ids", "w"), _embed, _embed_reference, {"dtype": None}),
    OpDef("matmul", ("x", "y"), _matmul, lambda c: (np.matmul(c.args[0], c.args[1]),)),
    OpDef("linear", ("x", "w", "b?", "residual?"), _linear, linear_reference, LINEAR_ATTRS),
    OpDef("rms_norm", ("x", "w?"), _norm, _rms_norm_reference, _NORM),
    OpDef("layer_norm", ("x", "w?", "b?"), _norm, _layer_norm_reference, _NORM),
    OpDef("rope", ("x", "cos", "sin"), _rope, _rope_reference, {"interleaved": False, "offset": 0}),
)
