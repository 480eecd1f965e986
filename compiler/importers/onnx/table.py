"""Which converter each ONNX op has: one literal list of tables, one for each family of ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.importers.onnx import attention, gather, linear, ort, pointwise, quantized, shape

CONVERTERS: dict[str, Callable[..., Any]] = {
    **pointwise.TABLE,
    **shape.TABLE,
    **gather.TABLE,
    **linear.TABLE,
    **attention.TABLE,
    **ort.TABLE,
    **quantized.TABLE,
}
