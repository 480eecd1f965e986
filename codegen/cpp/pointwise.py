"""Pointwise groups printed as loops: one function per distinct group, shared by all places where it occurs.

A group whose values are all f32 (comparisons inside it aside) works on vectors of 16; any other is a scalar
loop whose functions have the bits of the vector ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from codegen.cpp.spelling import ctype, key, literal, size
from codegen.loops import NoKernel, merged_axes
from ir.dims import Dim
from ir.graph import Arg, Op, Scalar, Value, Weight, tensor_of
from ir.types import DType, Tensor

BINARY = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "pow": "pow({0}, {1})",
    "maximum": "maximum({0}, {1})", "minimum": "minimum({0}, {1})", "floordiv": "floordiv({0}, {1})",
    "mod": "mod({0}, {1})", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "and": "{0} & {1}", "or": "{0} | {1}",
}  # fmt: skip
FUNCTIONS = (
    "abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sin", "cos", "sigmoid", "erf", "relu", "silu", "gelu",
    "gelu_tanh", "softplus", "floor",
)  # fmt: skip
UNARY = {name: f"{name}({{0}})" for name in FUNCTIONS} | {"expand": "{0}"}
VECTOR = BINARY | UNARY | {"neg": "neg({0})", "not": "~{0}", "where": "select({0}, {1}, {2})"}
SCALAR = BINARY | UNARY | {"neg": "-{0}", "not": "!{0}", "where": "{0} ? {1} : {2}"}
POWERS = {2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "sqrt({0})", -0.5: "rsqrt({0})", 1.0: "{0}"}


@dataclass(frozen=True)
class Operand:
    """An array that a group reads or writes. pointer and first, the first axis's stride, are C++."""

    type: Tensor
    pointer: str
    first: str
    strides: tuple[int, ...]  # of the axes after the first


@dataclass(frozen=True)
class Group:
    """A group ready to print. shape: what it runs over; inputs and outputs by value name."""

    ops: tuple[Op, ...]
    shape: tuple[Dim, ...]
    inputs: dict[str, Operand]
    outputs: dict[str, Operand]


def is_vector(group: Group) -> bool:
    """Whether all that is read and written is f32 and every step works on vectors."""
    arrays = (*group.inputs.values(), *group.outputs.values())
    inner = [o.type for op in group.ops for o in op.outs]
    return (
        all(a.type.dtype is DType.F32 for a in arrays)
        and all(cast(Tensor, t).dtype in (DType.F32, DType.BOOL) for t in inner)
        and all(s in (0, 1) for a in arrays for s in a.strides[-1:])
    )


def print_group(group: Group) -> tuple[str, list[str]]:
    """(the function's text with NAME for its name, the arguments of this call)."""
    rows = size(group.shape[0]) if group.shape else "1"
    arrays = list(group.inputs.items()) + list(group.outputs.items())
    params, args, local = ["Thread& th", "int64_t rows"], ["th", rows], {}
    for index, (name, array) in enumerate(arrays):
        written = name in group.outputs
        short = f"y{index - len(group.inputs)}" if written else f"a{index}"
        local[name] = short
        params += [f"{'' if written else 'const '}{ctype(array.type.dtype)}* {short}", f"int64_t {short}_ld"]
        args += [array.pointer, array.first]
    axes = _axes(group)
    vector = is_vector(group) and bool(axes)
    lines = [
        f"void NAME({', '.join(params)}) {{",
        "  for (int64_t t = th.first(rows); t < th.last(rows); t++)",
    ]
    loops = axes[:-1] if vector else axes
    lines += [f"  for (int64_t i{i} = 0; i{i} < {axes[i][0]}; i{i}++)" for i in range(len(loops))]
    body = _vector_body(group, axes, local) if vector else _scalar_body(group, axes, local)
    return "\n".join([*lines, *body, "}"]) + "\n", args


def _axes(group: Group) -> list[tuple[int, dict[str, int]]]:
    """The axes after the first, merged where every array allows it."""
    arrays = {**group.inputs, **group.outputs}
    return merged_axes(group.shape[1:], {name: a.strides for name, a in arrays.items()})


def _address(short: str, name: str, axes: Sequence[tuple[int, dict[str, int]]], count: int) -> str:
    terms = [f"{short} + t * {short}_ld"]
    terms += [f"i{i} * {axes[i][1][name]}" for i in range(count) if axes[i][1][name]]
    return " + ".join(terms)


def _vector_body(
    group: Group, axes: Sequence[tuple[int, dict[str, int]]], local: dict[str, str]
) -> list[str]:
    width, strides = axes[-1]
    whole = width % 16 == 0
    lines = [f"  for (int64_t c = 0; c < {width}; c += W) {{"]
    names: dict[str, str] = {}
    for index, name in enumerate(group.inputs):
        at = _address(local[name], name, axes, len(axes) - 1)
        load = f"load({at} + c)" if whole else f"load_n({at} + c, {width} - c)"
        names[name] = f"x{index}"
        lines.append(f"    F x{index} = {load if strides[name] else f'splat(*({at}))'};")
    for op in group.ops:
        names[key(op.out)] = f"t{len(names)}"
        kind = "I" if cast(Tensor, op.out.type).dtype is DType.BOOL else "F"
        lines.append(f"    {kind} {names[key(op.out)]} = {_vector(op, names)};")
    for name in group.outputs:
        at = _address(local[name], name, axes, len(axes) - 1)
        store = (
            f"store({at} + c, {names[name]})" if whole else f"store_n({at} + c, {names[name]}, {width} - c)"
        )
        lines.append(f"    {store};")
    return [*lines, "  }"]


def _vector(op: Op, names: dict[str, str]) -> str:
    def term(arg: Arg) -> str:
        if isinstance(arg, Scalar):
            return f"splat({literal(arg.value, DType.F32)})"
        return names[key(cast(Value, arg))]

    power = _power(op)
    if power is not None:
        return power.format(term(op.args[0]))
    if op.kind == "clamp":
        return _clamp(op, term(op.args[0]), lambda v: f"splat({literal(v, DType.F32)})")
    if op.kind == "cast":
        types = [tensor_of(arg).dtype for arg in (cast(Value, op.args[0]), op.out)]
        found = {
            (DType.F32, DType.BOOL): "{0} != splat(0)",
            (DType.BOOL, DType.F32): "select({0}, splat(1), splat(0))",
        }
        return found.get((types[0], types[1]), "{0}").format(term(op.args[0]))
    if op.kind not in VECTOR:
        raise NoKernel("it has no spelling in a pointwise loop")
    return VECTOR[op.kind].format(*(term(a) for a in op.args))


def _power(op: Op) -> str | None:
    exponent = op.args[1] if op.kind == "pow" else None
    return POWERS.get(float(exponent.value)) if isinstance(exponent, Scalar) else None


def _clamp(op: Op, x: str, spell: Any) -> str:
    low, high = op.attr("low"), op.attr("high")
    x = x if low is None else f"maximum({x}, {spell(low)})"
    return x if high is None else f"minimum({x}, {spell(high)})"


def _scalar_body(
    group: Group, axes: Sequence[tuple[int, dict[str, int]]], local: dict[str, str]
) -> list[str]:
    lines = ["  {"]
    names: dict[str, str] = {}
    for index, (name, array) in enumerate(group.inputs.items()):
        at = f"*({_address(local[name], name, axes, len(axes))})"
        names[name] = f"x{index}"
        lines.append(f"    {_held(array.type.dtype)} x{index} = {_read(at, array.type.dtype)};")
    for op in group.ops:
        dtype = cast(Tensor, op.out.type).dtype
        names[key(op.out)] = f"t{len(names)}"
        lines.append(f"    {_held(dtype)} {names[key(op.out)]} = {_scalar(op, dtype, names)};")
    for name, array in group.outputs.items():
        at = f"*({_address(local[name], name, axes, len(axes))})"
        value = f"to_bf16({names[name]})" if array.type.dtype is DType.BF16 else names[name]
        lines.append(f"    {at} = {value};")
    return [*lines, "  }"]


def _held(dtype: DType) -> str:
    """The type of a local variable: a bf16 is held as the float that it stands for."""
    return "float" if dtype is DType.BF16 else ctype(dtype)


def _read(at: str, dtype: DType) -> str:
    return f"to_float({at})" if dtype is DType.BF16 else at


def _scalar(op: Op, dtype: DType, names: dict[str, str]) -> str:
    types = [a.type.dtype for a in op.args if isinstance(a, Value | Weight) and isinstance(a.type, Tensor)]
    beside = types[-1]  # of a literal

    def term(arg: Arg) -> str:
        if isinstance(arg, Scalar):
            return literal(arg.value, DType.F32 if beside is DType.BF16 else beside)
        return names[key(cast(Value, arg))]

    power = _power(op)
    if DType.F64 in types and op.kind in (*FUNCTIONS, "pow") and op.kind not in ("abs", "sqrt"):
        raise NoKernel(f"{op.kind} of f64 values is not computed at run time: cast to f32")
    if power is not None:
        text = power.format(term(op.args[0]))
    elif op.kind == "clamp":
        text = _clamp(op, term(op.args[0]), lambda v: term(Scalar(v)))
    elif op.kind == "cast":
        text = f"({term(op.args[0])} != 0)" if dtype is DType.BOOL else f"{_held(dtype)}({term(op.args[0])})"
    elif op.kind in SCALAR:
        text = SCALAR[op.kind].format(*(term(a) for a in op.args))
    else:
        raise NoKernel("it has no spelling in a pointwise loop")
    if dtype is DType.BF16:
        return f"round_bf16({text})"
    return f"{_held(dtype)}({text})"
