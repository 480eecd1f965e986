"""Ops that move elements without computing on them, and ops that make constants."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from ir.dims import CeilDiv, Dim, normalize, product
from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall, broadcast, common_dtype, fits, is_size
from ir.types import DType, Tensor, Type


@lru_cache(maxsize=4096)
def same_size(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    """Whether two symbolic shapes have the same number of elements."""
    return product(a) == product(b)


def _reshape(call: Call) -> tuple[Type, ...]:
    x, shape = call.tensor(0), call.sizes("shape")
    if not same_size(x.shape, shape):
        call.fail(f"{list(x.shape)} has not as many elements as {list(shape)}")
    return (Tensor(x.dtype, shape),)


def _transpose(call: Call) -> tuple[Type, ...]:
    x, perm = call.tensor(0), call.integers("perm")
    if sorted(perm) != list(range(x.rank)):
        call.fail(f"perm {list(perm)} is not a permutation of {x.rank} axes")
    return (Tensor(x.dtype, tuple(x.shape[p] for p in perm)),)


def _expand(call: Call) -> tuple[Type, ...]:
    x, shape = call.tensor(0), call.sizes("shape")
    if broadcast(call, [x.shape, shape]) != shape:
        call.fail(f"{list(x.shape)} does not broadcast to {list(shape)}")
    return (Tensor(x.dtype, shape),)


def _slice(call: Call) -> tuple[Type, ...]:
    x, step = call.tensor(0), call.integer("step", 1)
    axis, start, stop = call.axis(x.rank, call.attrs["axis"]), call.size("start"), call.size("stop")
    if not (is_size(normalize(stop - start)) and is_size(normalize(x.shape[axis] - stop))):
        call.fail(f"{start}:{stop} is not inside an axis of {x.shape[axis]}")
    length: Dim = normalize(CeilDiv(stop - start, step))
    return (Tensor(x.dtype, (*x.shape[:axis], length, *x.shape[axis + 1 :])),)


def _concat(call: Call) -> tuple[Type, ...]:
    tensors = [call.tensor(i) for i in range(max(1, len(call.types)))]
    axis = call.axis(tensors[0].rank, call.attrs["axis"])
    rest = {(t.rank, *t.shape[:axis], *t.shape[axis + 1 :]) for t in tensors}
    if len(rest) != 1:
        call.fail(f"shapes {[list(t.shape) for t in tensors]} differ outside axis {axis}")
    total: Any = sum(t.shape[axis] for t in tensors)
    shape = tensors[0].shape
    return (Tensor(common_dtype(call), (*shape[:axis], total, *shape[axis + 1 :])),)


def _split(call: Call) -> tuple[Type, ...]:
    x, sizes = call.tensor(0), call.sizes("sizes")
    axis = call.axis(x.rank, call.attrs["axis"])
    total: Any = sum(sizes)
    if not sizes or normalize(total) != x.shape[axis]:
        call.fail(f"sizes {list(sizes)} do not add up to {x.shape[axis]}")
    return tuple(Tensor(x.dtype, (*x.shape[:axis], n, *x.shape[axis + 1 :])) for n in sizes)


def _iota(call: Call) -> tuple[Type, ...]:
    return (Tensor(_no_bool(call), (call.size("size"),)),)


def _full(call: Call) -> tuple[Type, ...]:
    value, dtype = call.attrs["value"], call.dtype()
    if not (type(value) in (bool, int, float) and fits(value, dtype)):
        call.fail(f"the value {value!r} does not fit the type {dtype}")
    return (Tensor(dtype, call.sizes("shape")),)


def _dim(call: Call) -> tuple[Type, ...]:
    call.size("size")
    return (Tensor(_no_bool(call), ()),)


def _no_bool(call: Call) -> DType:
    dtype = call.dtype()
    if dtype is DType.BOOL:
        call.fail("makes numbers, not bool")
    return dtype


def _take(call: Call) -> tuple[Type, ...]:
    x, indices = call.tensor(0), call.tensor(1)
    axis = call.axis(x.rank, call.attrs["axis"])
    if not indices.dtype.is_integer:
        call.fail(f"indices must be integers, not {indices.dtype}")
    return (Tensor(x.dtype, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])),)


def _take_rows(call: Call) -> tuple[Type, ...]:
    x, rows = call.tensor(0), call.tensor(1)
    if x.rank < 1 or rows.rank != 1 or not rows.dtype.is_integer:
        call.fail("takes x [T,..] and rows, a vector of integers")
    return (Tensor(x.dtype, (*rows.shape, *x.shape[1:])),)


def gather(x: Any, indices: Any, axis: int) -> Any:
    """x at indices along an axis. Raises IndexError on negative ones too, which numpy counts from the end."""
    if np.size(indices) and not (0 <= np.min(indices) and np.max(indices) < x.shape[axis]):
        raise IndexError(f"indices {np.min(indices)}..{np.max(indices)} leave an axis of {x.shape[axis]}")
    return np.take(x, indices, axis)


def _slice_reference(call: RefCall) -> tuple[Array]:
    a = call.attrs
    index = (slice(None),) * a["axis"] + (slice(a["start"], a["stop"], a["step"]),)
    return (call.args[0][index],)


def _split_reference(call: RefCall) -> list[Array]:
    cuts = np.cumsum(call.attrs["sizes"])[:-1]
    return list(np.split(call.args[0], cuts, axis=call.attrs["axis"]))


def _typed(call: RefCall, array: Any) -> Array:
    dtype = DType(call.attrs["dtype"])
    return np.asarray(array).astype(call.float_type if dtype is DType.F32 else dtype.numpy)


def _transpose_reference(call: RefCall) -> tuple[Array]:
    return (call.args[0].transpose(call.attrs["perm"]),)


def _take_rows_reference(call: RefCall) -> tuple[Array]:
    return (gather(call.args[0], call.args[1], 0),)


def _take_reference(call: RefCall) -> tuple[Array]:
    return (gather(call.args[0], call.args[1], call.attrs["axis"]),)


def _iota_reference(call: RefCall) -> tuple[Array]:
    return (_typed(call, np.arange(call.attrs["size"])),)


def _full_reference(call: RefCall) -> tuple[Array]:
    return (_typed(call, np.full(call.attrs["shape"], call.attrs["value"])),)


_SLICE = {"axis": REQUIRED, "start": REQUIRED, "stop": REQUIRED, "step": 1}
_FULL = {"shape": REQUIRED, "value": REQUIRED, "dtype": "f32"}
_SIZE = {"size": REQUIRED, "dtype": "i32"}
_SHAPE = {"shape": REQUIRED}
_AXIS = {"axis": REQUIRED}

OPS: tuple[OpDef, ...] = (
    OpDef("reshape", ("x",), _reshape, lambda c: (c.args[0].reshape(c.attrs["shape"]),), _SHAPE),
    OpDef("transpose", ("x",), _transpose, _transpose_reference, {"perm": REQUIRED}),
    OpDef("expand", ("x",), _expand, lambda c: (np.broadcast_to(c.args[0], c.attrs["shape"]),), _SHAPE),
    OpDef("slice", ("x",), _slice, _slice_reference, _SLICE),
    OpDef("concat", ("x*",), _concat, lambda c: (np.concatenate(c.args, c.attrs["axis"]),), _AXIS),
    OpDef("split", ("x",), _split, _split_reference, {"axis": REQUIRED, "sizes": REQUIRED}),
    OpDef("iota", (), _iota, _iota_reference, _SIZE),
    OpDef("full", (), _full, _full_reference, _FULL),
    OpDef("dim", (), _dim, lambda c: (_typed(c, c.attrs["size"]),), _SIZE),
    OpDef("take", ("x", "indices"), _take, _take_reference, _AXIS),
    OpDef("take_rows", ("x", "rows"), _take_rows, _take_rows_reference, sequence_aware=True),
)
