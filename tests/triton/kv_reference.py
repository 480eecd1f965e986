"""What a cache's stream keeps of elements, written out in numpy by the formats' definitions."""

from __future__ import annotations

import numpy as np

from ir.types import DType, Stream
from tests.codegen.harness import Array


def encoded(x: Array, stream: Stream) -> dict[str, Array]:
    """The parts of a block [tokens, heads, size] of f32; per channel it is a whole one."""
    if not stream.is_quantized:
        return {stream.name: x.astype(stream.dtype.numpy)}
    axis = 0 if stream.per == "channel" else 2
    high, low = x.max(axis, keepdims=True), x.min(axis, keepdims=True)
    if stream.has_minimum:
        most, base = (1 << stream.dtype.bits) - 1, low.astype(np.float16)
        scale = ((high - low) / np.float32(most)).astype(np.float16)
    else:
        most, base = (127 if stream.dtype is DType.I8 else 448), np.zeros_like(low, np.float16)
        scale = (np.abs(x).max(axis, keepdims=True) / np.float32(most)).astype(np.float16)
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, np.float32(0), np.float32(1) / scale.astype(np.float32))
    scaled = np.clip((x - base.astype(np.float32)) * inverse, -most if not stream.has_minimum else 0, most)
    codes = scaled if stream.dtype is DType.F8E4M3 else np.rint(scaled)
    found = {stream.name: codes.astype(stream.dtype.numpy), f"{stream.name}.scale": scale.squeeze(axis)}
    return found | ({f"{stream.name}.min": base.squeeze(axis)} if stream.has_minimum else {})


def decoded(parts: dict[str, Array], stream: Stream) -> Array:
    """f64 [tokens, heads, size] of what encoded() returned."""
    axis = 0 if stream.per == "channel" else 2
    x = parts[stream.name].astype(np.float64)
    for part in stream.parts[1:]:
        value = np.expand_dims(parts[part].astype(np.float64), axis)
        x = x + value if part.endswith(".min") else x * value
    return x
