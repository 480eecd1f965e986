"""KV blocks as docs/artifact.md defines them, read by numpy; and codes as numpy would choose them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from ir.types import CHANNEL, KV, DType, Stream

Array = np.ndarray[Any, np.dtype[Any]]
LARGEST = {DType.I8: 127, DType.F8E4M3: 448, DType.U4: 15, DType.U2: 3}


def unpack(raw: Array, bits: int) -> Array:
    """Codes [..., n] of packed strips [..., n / 16, bytes], flat.

    Byte j holds a strip's codes j, j + bytes, ..., from the low bits up.
    """
    per_strip = 2 * bits
    strips = raw.reshape(*raw.shape[:-1], -1, per_strip)
    parts = [(strips >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.concatenate(parts, -1).reshape(*raw.shape[:-1], -1)


def read_stream(kv: KV, index: int, pool: Array) -> dict[str, Array]:
    """Layer 0 of a stream: codes [blocks, block, heads, size], scales, minima. pool: [blocks, bytes]."""
    s, keys = kv.streams[index], index == 0
    at = sum(x.bytes_per_block(kv.block) for x in kv.streams[:index])
    width = s.head_size if keys or s.dtype.bits >= 8 else -(-s.head_size // 16) * 16
    size = s.heads * width * kv.block * s.dtype.bits // 8
    raw = pool[:, at : at + size].copy()
    flat = unpack(raw, s.dtype.bits) if s.dtype.bits < 8 else raw.view(s.dtype.numpy)
    shape = (len(pool), s.heads, width, kv.block) if keys else (len(pool), s.heads, kv.block, width)
    codes = flat.reshape(shape).transpose((0, 3, 1, 2) if keys else (0, 2, 1, 3))[..., : s.head_size]
    found = {"codes": codes}
    columns = s.head_size if s.per == CHANNEL else kv.block
    for number, name in enumerate(("scale", "minimum")[: len(s.parts) - 1]):
        start = at + size + number * 2 * s.heads * columns
        part = pool[:, start : start + 2 * s.heads * columns].copy().view(np.float16)
        found[name] = part.reshape(len(pool), s.heads, columns)
    return found


def quantized(x: Array, s: Stream) -> dict[str, Array]:
    """Codes, scales and minima of x [tokens, heads, size]; of one block where scales are per channel."""
    x = np.asarray(x, np.float32)
    axis = 0 if s.per == CHANNEL else 2
    largest = np.float32(LARGEST[s.dtype])
    with np.errstate(all="ignore"):
        low = (
            x.min(axis).astype(np.float16)
            if s.has_minimum
            else np.float16(0) * x.min(axis).astype(np.float16)
        )
        top = x.max(axis) - x.min(axis) if s.has_minimum else np.abs(x).max(axis)
        scale = (top / largest).astype(np.float16)
        wide = np.expand_dims(scale.astype(np.float32), axis)
        inverse = np.where(wide == 0, np.float32(0), np.float32(1) / wide)
        scaled = (
            (x - np.expand_dims(low.astype(np.float32), axis)) * inverse if s.has_minimum else x * inverse
        )
    scaled = np.clip(np.nan_to_num(scaled, nan=0.0), 0 if s.has_minimum else -largest, largest)
    codes = scaled.astype(ml_dtypes.float8_e4m3fn) if s.dtype is DType.F8E4M3 else np.rint(scaled)
    found = {"codes": codes.astype(s.dtype.numpy), "scale": scale}
    return found | ({"minimum": low} if s.has_minimum else {})


def decoded(parts: dict[str, Array], s: Stream) -> Array:
    """What the stream holds, in float64: [blocks, block, heads, size]."""
    x = parts["codes"].astype(np.float64)
    if "scale" not in parts:
        return x
    spread = (lambda a: a[:, None]) if s.per == CHANNEL else (lambda a: a.transpose(0, 2, 1)[..., None])
    x = x * spread(parts["scale"].astype(np.float64))
    return x + spread(parts["minimum"].astype(np.float64)) if "minimum" in parts else x
