"""The largest elements of a row, and the elements of a row at indices of its own."""

from __future__ import annotations

import numpy as np

from ir.dims import normalize
from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall, is_size
from ir.types import DType, Tensor, Type


def _topk(call: Call) -> tuple[Type, ...]:
    x, k = call.tensor(0), call.integer("k", 1)
    if not (x.dtype.is_float or x.dtype.is_integer):
        call.fail(f"needs numbers, not {x.dtype}")
    if x.rank < 1 or not is_size(normalize(x.shape[-1] - k)):
        call.fail(f"there are not {k} elements along the last axis of {list(x.shape)}")
    shape = (*x.shape[:-1], k)
    return Tensor(x.dtype, shape), Tensor(DType.I32, shape)


def _take_along(call: Call) -> tuple[Type, ...]:
    x, indices = call.tensor(0), call.tensor(1)
    if not indices.dtype.is_integer:
        call.fail(f"indices must be integers, not {indices.dtype}")
    if x.rank < 1 or x.rank != indices.rank or x.shape[:-1] != indices.shape[:-1]:
        call.fail(f"x {list(x.shape)} and indices {list(indices.shape)} differ before their last axis")
    return (Tensor(x.dtype, indices.shape),)


def largest(x: Array, k: int) -> Array:
    """Indices [..,k] of the k largest, in falling order; equal ones by rising index. A NaN is the largest."""
    if k > x.shape[-1]:
        raise IndexError(f"the {k} largest leave an axis of {x.shape[-1]}")
    if np.issubdtype(x.dtype, np.integer):
        order = np.argsort(~x, axis=-1, kind="stable")  # not -x, which the least integer does not have
    else:
        order = np.lexsort((-x, ~np.isnan(x)), axis=-1)
    return order[..., :k].astype(np.int32)


def _topk_reference(call: RefCall) -> tuple[Array, Array]:
    x = call.args[0]
    indices = largest(x, call.attrs["k"])
    return np.take_along_axis(x, indices, -1), indices


def _take_along_reference(call: RefCall) -> tuple[Array]:
    x, indices = call.args
    if indices.size and not (0 <= indices.min() and indices.max() < x.shape[-1]):
        raise IndexError(f"indices {indices.min()}..{indices.max()} leave an axis of {x.shape[-1]}")
    return (np.take_along_axis(x, indices.astype(np.int64), -1),)


OPS: tuple[OpDef, ...] = (
    OpDef("topk", ("x",), _topk, _topk_reference, {"k": REQUIRED}),
    OpDef("take_along", ("x", "indices"), _take_along, _take_along_reference),
)
