"""The codes of a KV stream: how elements become codes and scales, and codes elements again.

i8 and f8e4m3 are symmetric, with a scale for each token and head. u4 and u2 have a scale and a minimum, for
each token and head or, per channel, for each head and channel of a block (KIVI, arXiv 2402.02750).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ir.ops.base import Array
from ir.ops.quantize import quantize_dynamic
from ir.types import CHANNEL, DType, Stream


def encode(x: Array, stream: Stream) -> dict[str, Array]:
    """Elements [..., block, heads, head_size] as the stream's parts; per token `block` may be any number."""
    if not stream.is_quantized:
        return {stream.name: x}
    if not stream.has_minimum:
        codes, scale = quantize_dynamic(x, stream.dtype, 0, DType.F16, x.dtype.type)
        return dict(zip(stream.parts, (codes, scale[..., 0]), strict=True))
    axis = -3 if stream.per == CHANNEL else -1
    low = x.min(axis, keepdims=True).astype(np.float16)
    steps = x.dtype.type((1 << stream.dtype.bits) - 1)
    scale = ((x.max(axis, keepdims=True) - x.min(axis, keepdims=True)) / steps).astype(np.float16)
    with np.errstate(all="ignore"):
        inverse = np.where(scale == 0, 0, 1 / scale.astype(x.dtype))
        scaled = np.nan_to_num((x - low.astype(x.dtype)) * inverse.astype(x.dtype), nan=0.0)
    codes = np.clip(np.rint(scaled), 0, steps).astype(np.uint8)
    return dict(zip(stream.parts, (codes, scale.squeeze(axis), low.squeeze(axis)), strict=True))


def decode(parts: dict[str, Array], stream: Stream, dtype: Any = np.float32) -> Array:
    """Elements [..., block, heads, head_size] of the stream's parts."""
    x = parts[stream.name].astype(dtype)
    if not stream.is_quantized:
        return x
    axis = -3 if stream.per == CHANNEL else -1
    scale, *low = (np.expand_dims(parts[p].astype(dtype), axis) for p in stream.parts[1:])
    x = x * scale
    return x + low[0] if low else x
