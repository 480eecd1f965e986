"""Casts between f32 and bf16 in Triton's interpreter: it cuts bits off where devices round to nearest."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from runtime.gpu.device import Array


@lru_cache(maxsize=1)
def round_casts(interpreter: Any) -> None:
    """Make the interpreter's module round as devices do."""
    language, others = interpreter.tl, interpreter._convert_float

    def convert(data: Array, source: Any, target: Any, rounding: Any) -> Array:
        if (source, target) == (language.float32, language.bfloat16):
            return data.astype(ml_dtypes.bfloat16).view(np.uint16)
        if (source, target) == (language.bfloat16, language.float32):
            return data.astype(np.uint32) << 16
        return others(data, source, target, rounding)

    interpreter._convert_float = convert
