"""Running one op in the interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np

from ir.build import GraphBuilder
from ir.graph import Arg, Scalar
from ir.interpret import interpret
from ir.types import DType, Tensor

TYPES = {dtype.numpy: dtype for dtype in DType}


def results(kind: str, *operands: Any, wide: bool = False, **attrs: Any) -> tuple[Any, ...]:
    """All results of one op. Arrays are inputs (float64 ones stand for f32 when wide), others literals."""
    builder = GraphBuilder("one", {})
    inputs: dict[str, Any] = {}
    args: list[Arg] = []
    for i, operand in enumerate(operands):
        if isinstance(operand, np.ndarray):
            dtype = DType.F32 if wide and operand.dtype == np.float64 else TYPES[operand.dtype]
            args.append(builder.input(f"x{i}", Tensor(dtype, operand.shape)))
            inputs[f"x{i}"] = operand
        else:
            args.append(None if operand is None else Scalar(operand))
    outs = builder.op(kind, *args, several=True, **attrs)
    return interpret(builder.graph(outs), inputs, {}, np.float64 if wide else np.float32).outputs


def result(kind: str, *operands: Any, wide: bool = False, **attrs: Any) -> Any:
    """The only result of one op."""
    (only,) = results(kind, *operands, wide=wide, **attrs)
    return only
