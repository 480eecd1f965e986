"""Quantised values: codes with a scale for each group of elements along the last axis.

An element is (code - zero) * scale + offset, each step rounded once. Groups have `group_size` elements, the
last one of a row what is left; 0 makes a row one group. docs/ir.md describes the types.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ir.dims import CeilDiv, Dim, normalize
from ir.ops.base import REQUIRED, Array, Call, OpDef, RefCall
from ir.ops.linear import linear_reference, linear_shape
from ir.ops.shape import gather
from ir.types import DType, Tensor, Type

LARGEST = {DType.I8: 127.0, DType.F8E4M3: 448.0}  # code of the largest element of a symmetric group
DYNAMIC = tuple(LARGEST)
STATIC = (DType.U4, *DYNAMIC)
SYMMETRIC_ZERO = 8  # of u4


def num_groups(size: Dim, group_size: int) -> Dim:
    """Groups of a row of `size` elements."""
    return 1 if group_size == 0 else normalize(CeilDiv(size, group_size))


def _groups(call: Call, shape: tuple[Dim, ...], name: str = "group_size") -> tuple[Dim, ...]:
    """The shape of an array's scales."""
    if not shape:
        call.fail("a scalar has no groups")
    return (*shape[:-1], num_groups(shape[-1], call.integer(name)))


def _code_dtype(call: Call, name: str, allowed: tuple[DType, ...]) -> DType:
    found = call.dtype(name)
    if found not in allowed:
        call.fail(f"attribute {name} must be one of {', '.join(allowed)}, not {found}")
    return found


def _scale_dtype(call: Call) -> DType:
    found = call.dtype("scale")
    if found not in (DType.F32, DType.F16, DType.BF16):
        call.fail(f"attribute scale must be f32, f16 or bf16, not {found}")
    return found


def _check_codes(call: Call, first: int) -> Tensor:
    """Codes and what scales them, from operand `first` on: codes, scale, zero?, offset?."""
    q, scale = call.tensor(first), call.tensor(first + 1)
    zero, offset = call.optional(first + 2), call.optional(first + 3)
    call.integer("zero")
    if not q.dtype.is_code:
        call.fail(f"codes are {q.dtype}; there are {', '.join(d for d in DType if d.is_code)}")
    wanted = _groups(call, q.shape)
    for name, array in (("scale", scale), ("zero", zero), ("offset", offset)):
        if array is not None and array.shape != wanted:
            call.fail(f"{name} is {list(array.shape)}, not {list(wanted)}: one for each group")
    if not scale.dtype.is_float or (offset is not None and not offset.dtype.is_float):
        call.fail("scale and offset must be float tensors")
    if zero is not None and not zero.dtype.is_integer:
        call.fail(f"zero must be integers, not {zero.dtype}")
    if q.dtype is DType.F8E4M3 and (zero is not None or call.attrs["zero"]):
        call.fail("codes of f8e4m3 have no zero")
    return q


def _quantize(call: Call) -> tuple[Type, ...]:
    x = call.tensor(0)
    if not x.dtype.is_float:
        call.fail(f"needs a float operand, not {x.dtype}")
    scale = Tensor(_scale_dtype(call), _groups(call, x.shape))
    return (Tensor(_code_dtype(call, "dtype", DYNAMIC), x.shape), scale)


def _quantize_weight(call: Call) -> tuple[Type, ...]:
    w, dtype = call.tensor(0), _code_dtype(call, "dtype", STATIC)
    if not w.dtype.is_float or w.rank != 2:
        call.fail(f"needs a matrix of floats, not {w.dtype}{list(w.shape)}")
    scale = Tensor(_scale_dtype(call), _groups(call, w.shape))
    symmetric = call.flag("symmetric")
    if not symmetric and dtype is not DType.U4:
        call.fail(f"codes of {dtype} are symmetric")
    return (Tensor(dtype, w.shape), scale) if symmetric else (Tensor(dtype, w.shape), scale, scale)


def _dequantize(call: Call) -> tuple[Type, ...]:
    return (Tensor(call.float_dtype(DType.F32), _check_codes(call, 0).shape),)


def _qembed(call: Call) -> tuple[Type, ...]:
    ids, q = call.tensor(0), _check_codes(call, 1)
    if not ids.dtype.is_integer or q.rank != 2:
        call.fail("needs integer ids and a table [V,H]")
    return (Tensor(call.float_dtype(DType.F32), (*ids.shape, q.shape[1])),)


def check_qlinear(call: Call) -> Tensor:
    """The codes of a linear's matrix. Raises InferError where they, x, or how it is quantised, do not fit."""
    q = _check_codes(call, 1)
    if not call.tensor(0).dtype.is_float:
        call.fail(f"needs a float operand, not {call.tensor(0).dtype}")
    if call.attrs["x_dtype"] is not None:
        _code_dtype(call, "x_dtype", DYNAMIC)
    call.integer("x_group_size")
    return q


def _qlinear(call: Call) -> tuple[Type, ...]:
    q = check_qlinear(call)
    return linear_shape(call, call.tensor(0), q, call.optional(5), call.optional(6))


def expand(per_group: Array, size: int, group_size: int) -> Array:
    """What each of `size` elements of a row has, from what each group has."""
    if group_size == 0:
        return np.broadcast_to(per_group, (*per_group.shape[:-1], size))
    return np.repeat(per_group, group_size, axis=-1)[..., :size]


def by_group(x: Array, group_size: int, fill: float = 0.0) -> Array:
    """[..., K] as [..., groups, group_size], the last group filled up."""
    size = x.shape[-1]
    step = group_size or max(1, size)
    missing = -size % step
    padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)], constant_values=fill) if missing else x
    return padded.reshape(*x.shape[:-1], -1, step)


def quantize_dynamic(
    x: Array, dtype: DType, group_size: int, scale: DType, float_type: type[np.floating[Any]] = np.float32
) -> tuple[Array, Array]:
    """(codes, scales as rounded to their type), symmetric: a group's largest element has the largest code.

    A group with a NaN or an infinity has such a scale too.
    """
    largest = LARGEST[dtype]
    amax = np.abs(by_group(x, group_size)).max(-1)
    scales = (amax / float_type(largest)).astype(scale.numpy).astype(float_type)
    with np.errstate(all="ignore"):
        inverse = np.where(scales == 0, 0, 1 / scales).astype(float_type)
        scaled = x * expand(inverse, x.shape[-1], group_size)
    scaled = np.clip(np.nan_to_num(scaled, nan=0.0), -largest, largest)
    codes = np.rint(scaled) if dtype is DType.I8 else scaled
    return codes.astype(dtype.numpy), scales.astype(scale.numpy)


def dequantize(
    codes: Array, scale: Array, zero: Array | int | None, offset: Array | None, group_size: int,
    float_type: type[np.floating[Any]] = np.float32,
) -> Array:  # fmt: skip
    """(codes - zero) * scale + offset. zero: an integer for all groups, or one for each."""
    size = codes.shape[-1]

    def each(a: Any) -> Any:
        return expand(np.asarray(a, float_type), size, group_size)

    x = codes.astype(float_type)
    if zero is not None:
        x = x - (float_type(zero) if isinstance(zero, int) else each(zero))
    x = x * each(scale)
    return x if offset is None else x + each(offset)


def round_weight(w: Array, dtype: DType, group_size: int, symmetric: bool, scale: DType) -> tuple[Array, ...]:
    """(codes, scale[, offset]) of a matrix, each element rounded to the nearest on its group's grid.

    Raises ValueError where it holds a NaN or an infinity.
    """
    if not np.isfinite(w).all():
        raise ValueError("a matrix with a NaN or an infinity cannot be quantised")
    w = w.astype(np.float32, copy=False)
    if dtype is not DType.U4:
        return quantize_dynamic(w, dtype, group_size, scale)
    groups = by_group(w, group_size)
    if symmetric:
        extreme = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)[..., 0]
        scales, low = (extreme / np.float32(-SYMMETRIC_ZERO)).astype(scale.numpy), None
    else:
        fill = np.where(by_group(np.ones_like(w), group_size) > 0, groups, np.nan)
        bottom = np.nanmin(fill, -1)
        low = bottom.astype(scale.numpy)
        scales = ((np.nanmax(fill, -1) - bottom) / np.float32(15)).astype(scale.numpy)
    steps = expand(scales.astype(np.float32), w.shape[-1], group_size)
    base = 0 if low is None else expand(low.astype(np.float32), w.shape[-1], group_size)
    with np.errstate(all="ignore"):
        codes = np.where(steps == 0, 0, (w - base) / steps) + (SYMMETRIC_ZERO if low is None else 0)
    codes = np.clip(np.rint(codes), 0, 15).astype(np.uint8)
    return (codes, scales) if low is None else (codes, scales, low)


def _quantize_reference(call: RefCall) -> tuple[Array, ...]:
    attrs = call.attrs
    dtype, scale = DType(attrs["dtype"]), DType(attrs["scale"])
    return quantize_dynamic(call.args[0], dtype, attrs["group_size"], scale, call.float_type)


def _quantize_weight_reference(call: RefCall) -> tuple[Array, ...]:
    a = call.attrs
    return round_weight(call.args[0], DType(a["dtype"]), a["group_size"], a["symmetric"], DType(a["scale"]))


def _matrix(call: RefCall, first: int) -> Array:
    """The floats that operands from `first` on stand for."""
    codes, scale, zero, offset = (call.arg(first + i) for i in range(4))
    zero = call.attrs["zero"] if zero is None else zero
    return dequantize(codes, scale, zero, offset, call.attrs["group_size"], call.float_type)


def _qembed_reference(call: RefCall) -> tuple[Array]:
    ids = call.args[0]
    rows = [gather(a, ids, 0) if isinstance(a, np.ndarray) else a for a in (call.arg(i) for i in range(1, 5))]
    picked = RefCall(call.kind, tuple(rows), call.attrs, call.float_type)
    return (_matrix(picked, 0),)


def qlinear_reference(call: RefCall) -> tuple[Array]:
    """Of x, q, scale and, where given, zero, offset, bias and residual."""
    x, kind, size = call.args[0], call.attrs["x_dtype"], call.attrs["x_group_size"]
    if kind is not None:
        codes, scale = quantize_dynamic(x, DType(kind), size, DType.F32, call.float_type)
        x = dequantize(codes, scale, None, None, size, call.float_type)
    args = (x, _matrix(call, 1), call.arg(5), call.arg(6))
    return linear_reference(RefCall(call.kind, args, call.attrs, call.float_type))


_CODES = {"group_size": REQUIRED, "zero": 0, "dtype": None}
QLINEAR_ATTRS = {**_CODES, "activation": "none", "gated": False, "x_dtype": None, "x_group_size": 32}

OPS: tuple[OpDef, ...] = (
    OpDef(
        "quantize", ("x",), _quantize, _quantize_reference,
        {"dtype": REQUIRED, "group_size": 32, "scale": "f32"},
    ),
    OpDef(
        "quantize_weight", ("w",), _quantize_weight, _quantize_weight_reference,
        {"dtype": REQUIRED, "group_size": REQUIRED, "symmetric": True, "scale": "f16"},
    ),
    OpDef(
        "dequantize", ("q", "scale", "zero?", "offset?"), _dequantize, lambda c: (_matrix(c, 0),), _CODES
    ),
    OpDef("qembed", ("ids", "q", "scale", "zero?", "offset?"), _qembed, _qembed_reference, _CODES),
    OpDef(
        "qlinear", ("x", "q", "scale", "zero?", "offset?", "b?", "residual?"), _qlinear, qlinear_reference,
        QLINEAR_ATTRS,
    ),
)  # fmt: skip
