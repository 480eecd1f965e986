"""Ops that move elements without computing on them, and ops that make constants."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import sympy

from ir.dims import Dim, product
from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall, broadcast, common_dtype
from ir.types import DType, Tensor, Type


def same_size(a: tuple[Dim, ...], b: tuple[Dim, ...]) -> bool:
    """Whether two symbolic shapes have the same number of elements."""
    return cast(bool, sympy.expand(sympy.sympify(product(a)) - sympy.sympify(product(b))) == 0)


def _reshape(call: Call) -> tuple[Type, ...]:
    x, shape = call.tensor(0), tuple(call.attrs["shape"])
    if not same_size(x.shape, shape):
        call.fail(f"{list(x.shape)} has not as many elements as {list(shape)}")
    return (Tensor(x.dtype, shape),)


def _transpose(call: Call) -> tuple[Type, ...]:
    x, perm = call.tensor(0), tuple(call.attrs["perm"])
    if sorted(perm) != list(range(x.rank)):
        call.fail(f"perm {list(perm)} is not a permutation of {x.rank} axes")
    return (Tensor(x.dtype, tuple(x.shape[p] for p in perm)),)


def _expand(call: Call) -> tuple[Type, ...]:
    x, shape = call.tensor(0), tuple(call.attrs["shape"])
    if broadcast(call, [x.shape, shape]) != Tensor(x.dtype, shape).shape:
        call.fail(f"{list(x.shape)} does not broadcast to {list(shape)}")
    return (Tensor(x.dtype, shape),)


def _slice(call: Call) -> tuple[Type, ...]:
    x, attrs = call.tensor(0), call.attrs
    axis, start, stop, step = call.axis(x.rank, attrs["axis"]), attrs["start"], attrs["stop"], attrs["step"]
    size: Any = x.shape[axis]
    if isinstance(size, int) and isinstance(stop, int) and not 0 <= start <= stop <= size:
        call.fail(f"{start}:{stop} is not inside an axis of {size}")
    if not isinstance(step, int) or step < 1:
        call.fail(f"step {step} must be at least 1")
    length: Any = stop - start if step == 1 else -((start - stop) // step)
    return (Tensor(x.dtype, (*x.shape[:axis], length, *x.shape[axis + 1 :])),)


def _concat(call: Call) -> tuple[Type, ...]:
    tensors = [call.tensor(i) for i in range(len(call.types))]
    axis = call.axis(tensors[0].rank, call.attrs["axis"])
    rest = {(*t.shape[:axis], *t.shape[axis + 1 :]) for t in tensors}
    if len(rest) != 1:
        call.fail(f"shapes {[list(t.shape) for t in tensors]} differ outside axis {axis}")
    total: Any = sum(cast(Any, t.shape[axis]) for t in tensors)
    shape = tensors[0].shape
    return (Tensor(common_dtype(call), (*shape[:axis], total, *shape[axis + 1 :])),)


def _split(call: Call) -> tuple[Type, ...]:
    x, sizes = call.tensor(0), tuple(call.attrs["sizes"])
    axis = call.axis(x.rank, call.attrs["axis"])
    if sympy.expand(sum(sizes) - cast(Any, x.shape[axis])) != 0:
        call.fail(f"sizes {list(sizes)} do not add up to {x.shape[axis]}")
    return tuple(Tensor(x.dtype, (*x.shape[:axis], n, *x.shape[axis + 1 :])) for n in sizes)


def _iota(call: Call) -> tuple[Type, ...]:
    return (Tensor(DType(call.attrs["dtype"]), (call.attrs["size"],)),)


def _full(call: Call) -> tuple[Type, ...]:
    return (Tensor(DType(call.attrs["dtype"]), tuple(call.attrs["shape"])),)


def _dim(call: Call) -> tuple[Type, ...]:
    return (Tensor(DType(call.attrs["dtype"]), ()),)


def _take(call: Call) -> tuple[Type, ...]:
    x, indices = call.tensor(0), call.tensor(1)
    axis = call.axis(x.rank, call.attrs["axis"])
    if not indices.dtype.is_integer:
        call.fail(f"indices must be integers, not {indices.dtype}")
    return (Tensor(x.dtype, (*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])),)


def _take_rows(call: Call) -> tuple[Type, ...]:
    x, rows = call.tensor(0), call.tensor(1)
    if rows.rank != 1 or not rows.dtype.is_integer:
        call.fail("rows must be a vector of integers")
    return (Tensor(x.dtype, (*rows.shape, *x.shape[1:])),)


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


OPS: tuple[OpDef, ...] = (
    OpDef("reshape", ("x",), _reshape, lambda c: (c.args[0].reshape(c.attrs["shape"]),), {"shape": REQUIRED}),
    OpDef("transpose", ("x",), _transpose, lambda c: (c.args[0].transpose(c.attrs["perm"]),), {"perm": REQUIRED}),
    OpDef("expand", ("x",), _expand, lambda c: (np.broadcast_to(c.args[0], c.attrs["shape"]),), {"shape": REQUIRED}),
    OpDef("slice", ("x",), _slice, _slice_reference, {"axis": REQUIRED, "start": REQUIRED, "stop": REQUIRED, "step": 1}),
    OpDef("concat", ("x*",), _concat, lambda c: (np.concatenate(c.args, c.attrs["axis"]),), {"axis": REQUIRED}),
    OpDef("split", ("x",), _split, _split_reference, {"axis": REQUIRED, "sizes": REQUIRED}),
    OpDef("iota", (), _iota, lambda c: (_typed(c, np.arange(c.attrs["size"])),), {"size": REQUIRED, "dtype": "i32"}),
    OpDef(
        "full", (), _full, lambda c: (_typed(c, np.full(c.attrs["shape"], c.attrs["value"])),),
        {"shape": REQUIRED, "value": REQUIRED, "dtype": "f32"},
    ),
    OpDef("dim", (), _dim, lambda c: (_typed(c, c.attrs["size"]),), {"size": REQUIRED, "dtype": "i32"}),
    OpDef("take", ("x", "indices"), _take, lambda c: (np.take(c.args[0], c.args[1], c.attrs["axis"]),), {"axis": REQUIRED}),
    OpDef("take_rows", ("x", "rows"), _take_rows, lambda c: (c.args[0][c.args[1]],), sequence_aware=True),
)  # fmt: skip
