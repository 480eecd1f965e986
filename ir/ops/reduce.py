"""Reductions, scans and convolutions: ops that mix elements along an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from ir.dims import Dim
from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall, Reference, common_dtype
from ir.types import Tensor, Type


def _reduce(call: Call) -> tuple[Type, ...]:
    x, axes = call.tensor(0), tuple(call.axis(call.tensor(0).rank, a) for a in call.attrs["axes"])
    if call.attrs["keepdims"]:
        return (Tensor(x.dtype, tuple(1 if i in axes else d for i, d in enumerate(x.shape))),)
    return (Tensor(x.dtype, tuple(d for i, d in enumerate(x.shape) if i not in axes)),)


def _along_axis(call: Call) -> tuple[Type, ...]:
    call.axis(call.tensor(0).rank, call.attrs["axis"])
    return (call.tensor(0),)


def _conv1d(call: Call) -> tuple[Type, ...]:
    """x [B, C, L], w [O, C/groups, W]: padding zeros on both sides, stride 1."""
    x, w, groups, padding = call.tensor(0), call.tensor(1), call.attrs["groups"], call.attrs["padding"]
    if x.rank != 3 or w.rank != 3 or cast(Any, x.shape[1]) != cast(Any, w.shape[1]) * groups:
        call.fail(f"{list(x.shape)} and {list(w.shape)} with groups={groups} do not fit")
    length: Dim = cast(Any, x.shape[2]) + 2 * padding - cast(Any, w.shape[2]) + 1
    return (Tensor(common_dtype(call), (x.shape[0], w.shape[0], length)),)


def _numpy_reduction(fn: Callable[..., Any]) -> Reference:
    def reference(call: RefCall) -> tuple[Array]:
        x = call.args[0]
        return (
            np.asarray(fn(x, axis=tuple(call.attrs["axes"]), keepdims=call.attrs["keepdims"]), dtype=x.dtype),
        )

    return reference


def softmax(x: Any, axis: int) -> Any:
    """exp(x - max) over its sum along an axis."""
    e = np.exp(x - x.max(axis=axis, keepdims=True))
    return e / e.sum(axis=axis, keepdims=True)


def _conv1d_reference(call: RefCall) -> tuple[Array]:
    x, w, bias = call.args[0], call.args[1], call.arg(2)
    padding, groups = call.attrs["padding"], call.attrs["groups"]
    padded = np.pad(x, ((0, 0), (0, 0), (padding, padding)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, w.shape[2], axis=2)  # [B, C, L, W]
    batch, _, length, width = windows.shape
    grouped = windows.reshape(batch, groups, -1, length, width)
    out = np.einsum("bgclw,gocw->bgol", grouped, w.reshape(groups, -1, *w.shape[1:]))
    out = out.reshape(batch, w.shape[0], length)
    return (out if bias is None else out + bias[:, None],)


_AXES = {"axes": REQUIRED, "keepdims": False}

OPS: tuple[OpDef, ...] = (
    OpDef("sum", ("x",), _reduce, _numpy_reduction(np.sum), _AXES),
    OpDef("mean", ("x",), _reduce, _numpy_reduction(np.mean), _AXES),
    OpDef("max", ("x",), _reduce, _numpy_reduction(np.max), _AXES),
    OpDef("softmax", ("x",), _along_axis, lambda c: (softmax(c.args[0], c.attrs["axis"]),), {"axis": REQUIRED}),
    OpDef("cumsum", ("x",), _along_axis, lambda c: (np.cumsum(c.args[0], c.attrs["axis"]).astype(c.args[0].dtype),),
          {"axis": REQUIRED}),
    OpDef("conv1d", ("x", "w", "b?"), _conv1d, _conv1d_reference, {"padding": 0, "groups": 1}),
)  # fmt: skip
