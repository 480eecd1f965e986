"""How types, literals, sizes, names and comments are spelled in C++. Nothing reaches source unescaped."""

from __future__ import annotations

import re
import textwrap
from typing import Any

import numpy as np
import sympy

from ir.dims import CeilDiv, FloorDiv
from ir.graph import Value, Weight
from ir.types import DType

CTYPES: dict[DType, str] = {
    DType.F64: "double",
    DType.F32: "float",
    DType.BF16: "bf16",
    DType.I64: "int64_t",
    DType.I32: "int32_t",
    DType.I8: "int8_t",
    DType.U8: "uint8_t",
    DType.BOOL: "uint8_t",
}


def ctype(dtype: DType) -> str:
    """Raises ValueError for an element type that the target does not compute in."""
    if dtype not in CTYPES:
        raise ValueError(f"the target has no {dtype} arithmetic; cast the value to f32 in the model")
    return CTYPES[dtype]


STORED = {DType.F16: "f16", DType.F8E4M3: "f8"}  # what kernels convert from and to, and compute nothing in


def stored_ctype(dtype: DType) -> str:
    """Of an array's elements. Raises ValueError for a type that the target does not store."""
    return STORED.get(dtype) or ctype(dtype)


def key(arg: Value | Weight) -> str:
    """A name that values and weights do not share."""
    return f"{'@' if isinstance(arg, Weight) else '%'}{arg.name}"


def identifier(name: str) -> str:
    """A C++ identifier that starts like `name`; the caller keeps them apart."""
    return "v_" + re.sub(r"[^A-Za-z0-9]", "_", name)


def comment(text: str) -> str:
    """Text that stays inside one `//` comment: printable ASCII, no line breaks, no backslash."""
    return "// " + re.sub(r"[^ -~]|\\", "?", text)


def call(name: str, *args: object) -> str:
    """A call by every thread, broken after commas where it is long."""
    text = f"{name}(th, {', '.join(map(str, args))});"
    return "\n      ".join(textwrap.wrap(text, 110, break_long_words=False, break_on_hyphens=False))


def literal(value: bool | int | float, dtype: DType) -> str:
    """A constant of an element type."""
    if dtype is DType.BOOL:
        return "1" if value else "0"
    if dtype.is_integer:
        return f"{ctype(dtype)}({int(value)})"
    number = float(np.float32(value)) if dtype is not DType.F64 else float(value)
    if number != number:
        return '__builtin_nanf("")'
    if number in (float("inf"), float("-inf")):
        return f"{'-' if number < 0 else ''}__builtin_inff()"
    if dtype is DType.F64:
        return repr(number)
    return f"{np.float32(value)!s}f"  # the shortest text that reads back as the same float


def size(dim: Any) -> str:
    """A size as a C++ expression over T, R and Q."""
    if isinstance(dim, (int, sympy.Integer)):
        return str(int(dim))
    if isinstance(dim, sympy.Symbol):
        return str(dim.name)
    args = [size(a) for a in dim.args]
    if isinstance(dim, sympy.Add):
        return f"({' + '.join(args)})"
    if isinstance(dim, sympy.Mul):
        return f"({' * '.join(args)})"
    if isinstance(dim, FloorDiv):
        return f"({args[0]} / {args[1]})"
    if isinstance(dim, CeilDiv):
        return f"(({args[0]} + {args[1]} - 1) / {args[1]})"
    if isinstance(dim, sympy.Pow) and isinstance(dim.exp, sympy.Integer) and dim.exp > 0:
        return f"({' * '.join([args[0]] * int(dim.exp))})"
    raise ValueError(f"size {dim} has no C++ spelling")
