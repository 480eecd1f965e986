"""Casts between f32 and bf16 in Triton's interpreter: it cuts bits off where devices round to nearest."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from runtime.gpu.device import Array


@lru_cache(maxsize=1)
def round_casts(interpreter: Any) -> None:
    """Make the interpreter's module round as devices do."""
    language, others = interpreter.tl, interpreter._convert_float

    def convert(data: Array, source: Any, target: Any, rounding: Any) -> Array:
        if (source, target) == (language.float32, language.bfloat16):
            return rounded(data)
        if (source, target) == (language.bfloat16, language.float32):
            return data.astype(np.uint32) << 16
        return others(data, source, target, rounding)

    interpreter._convert_float = convert


def rounded(data: Array) -> Array:
    """Bits of bf16 (u16) nearest to f32 values; of two equally near ones the even one. NaN stays NaN."""
    bits = np.asarray(data, np.float32).view(np.uint32)
    nearest = (bits + (0x7FFF + (bits >> 16 & 1)).astype(np.uint32)) >> 16
    return np.where(np.isnan(data), bits >> 16 | 0x40, nearest).astype(np.uint16)
