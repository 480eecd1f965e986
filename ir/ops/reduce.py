"""Reductions, scans and convolutions: ops that mix elements along an axis."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ir.dims import Dim, normalize
from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall, Reference, is_size
from ir.types import DType, Tensor, Type


def _reduce(call: Call) -> tuple[Type, ...]:
    x = call.tensor(0)
    axes = [call.axis(x.rank, a) for a in call.integers("axes")]
    if len(set(axes)) != len(axes):
        call.fail(f"axes {axes} holds an axis twice")
    if call.flag("keepdims"):
        return (Tensor(x.dtype, tuple(1 if i in axes else d for i, d in enumerate(x.shape))),)
    return (Tensor(x.dtype, tuple(d for i, d in enumerate(x.shape) if i not in axes)),)


def _sum(call: Call) -> tuple[Type, ...]:
    if call.tensor(0).dtype is DType.BOOL:
        call.fail("does not add bool operands: cast them first")
    return _reduce(call)


def _mean(call: Call) -> tuple[Type, ...]:
    call.floats()
    return _reduce(call)


def _cumsum(call: Call) -> tuple[Type, ...]:
    x = call.tensor(0)
    if x.dtype is DType.BOOL:
        call.fail("does not add bool operands: cast them first")
    call.axis(x.rank, call.attrs["axis"])
    return (x,)


def _softmax(call: Call) -> tuple[Type, ...]:
    call.floats()
    call.axis(call.tensor(0).rank, call.attrs["axis"])
    return (call.tensor(0),)


def _conv1d(call: Call) -> tuple[Type, ...]:
    """x [B,C,L], w [O,C/groups,W], b [O], stride 1: [B,O,L + 2 padding - dilation (W - 1)]."""
    x, w, bias = call.tensor(0), call.tensor(1), call.optional(2)
    groups, dilation = call.integer("groups", 1), call.integer("dilation", 1)
    padding, dtype = call.integer("padding"), call.floats()
    if x.rank != 3 or w.rank != 3:
        call.fail(f"x {list(x.shape)} is not [B,C,L] or w {list(w.shape)} is not [O,C/groups,W]")
    channels, outputs = w.shape[1], w.shape[0]
    if x.shape[1] != normalize(channels * groups) or not isinstance(outputs, int) or outputs % groups:
        call.fail(f"{list(x.shape)} and {list(w.shape)} with groups={groups} do not fit")
    if bias is not None and bias.shape != (outputs,):
        call.fail(f"bias {list(bias.shape)} is not [{outputs}]")
    length: Dim = normalize(x.shape[2] + 2 * padding - dilation * (w.shape[2] - 1))
    if not is_size(length) or length == 0:
        reach = f"a filter of {w.shape[2]} at dilation {dilation}"
        call.fail(f"{reach} is longer than {x.shape[2]} with padding {padding}")
    return (Tensor(dtype, (x.shape[0], outputs, length)),)


def _numpy_reduction(fn: Callable[..., Any]) -> Reference:
    def reference(call: RefCall) -> tuple[Array]:
        x, axes, keepdims = call.args[0], tuple(call.attrs["axes"]), call.attrs["keepdims"]
        return (np.asarray(fn(x, axis=axes, keepdims=keepdims), dtype=x.dtype),)

    return reference


def mean(x: Any, axis: tuple[int, ...], keepdims: bool = True) -> Any:
    """The sum over the number of elements; NaN where there are none."""
    total = np.sum(x, axis=axis, keepdims=keepdims)
    return total / math.prod(x.shape[a] for a in axis)


def softmax(x: Any, axis: int) -> Any:
    """exp(x - max) over its sum along an axis."""
    e = np.exp(x - x.max(axis=axis, keepdims=True, initial=-np.inf))
    return e / e.sum(axis=axis, keepdims=True)


def _softmax_reference(call: RefCall) -> tuple[Array]:
    return (softmax(call.args[0], call.attrs["axis"]),)


def _cumsum_reference(call: RefCall) -> tuple[Array]:
    x = call.args[0]
    return (np.cumsum(x, call.attrs["axis"]).astype(x.dtype),)


def _conv1d_reference(call: RefCall) -> tuple[Array]:
    x, w, bias = call.args[0], call.args[1], call.arg(2)
    padding, groups, dilation = (call.attrs[name] for name in ("padding", "groups", "dilation"))
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding)))
    reach = dilation * (w.shape[2] - 1) + 1
    windows = np.lib.stride_tricks.sliding_window_view(padded, reach, axis=2)[..., ::dilation]  # [B, C, L, W]
    batch, _, length, width = windows.shape
    outputs, channels, _ = w.shape
    grouped = windows.reshape(batch, groups, channels, length, width)
    out = np.einsum("bgclw,gocw->bgol", grouped, w.reshape(groups, outputs // groups, channels, width))
    out = out.reshape(batch, outputs, length)
    return (out if bias is None else out + bias[:, None],)


_AXES = {"axes": REQUIRED, "keepdims": False}

OPS: tuple[OpDef, ...] = (
    OpDef("sum", ("x",), _sum, _numpy_reduction(np.sum), _AXES),
    OpDef("mean", ("x",), _mean, _numpy_reduction(mean), _AXES),
    OpDef("max", ("x",), _reduce, _numpy_reduction(np.max), _AXES),
    OpDef("softmax", ("x",), _softmax, _softmax_reference, {"axis": REQUIRED}),
    OpDef("cumsum", ("x",), _cumsum, _cumsum_reference, {"axis": REQUIRED}),
    OpDef("conv1d", ("x", "w", "b?"), _conv1d, _conv1d_reference, {"padding": 0, "groups": 1, "dilation": 1}),
)
