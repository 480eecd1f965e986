"""Elementwise kernels: pointwise groups printed from the IR, and copies between operands laid out otherwise.

A program works on a tile of rows (along the first axis) and columns (all other axes as one). Values are held
as f32 where they are floats narrower than f64, and rounded wherever the graph says a narrower type.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from codegen.loops import NoKernel, merged_axes, operand_strides
from codegen.triton.context import TYPES, Context, dtype_of, literal, refuse, shape_of
from codegen.triton.launch import Arg as LaunchArg
from codegen.triton.launch import Case, always, cdiv, expression
from codegen.triton.schedule import row_tile
from ir.dims import Dim
from ir.graph import Arg, Op, Scalar, Value, Weight, tensor_of
from ir.types import DType
from passes.memory.schedule import Kernel

NARROW = (DType.BF16, DType.F16)
OPERATORS = {
    "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}", "and": "{0} & {1}",
    "or": "{0} | {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}",
    "eq": "{0} == {1}", "ne": "{0} != {1}", "neg": "-{0}", "where": "tl.where({0}, {1}, {2})",
    "maximum": "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "minimum": "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    "not": "{0} == 0", "abs": "tl.abs({0})", "sqrt": "tl.sqrt({0})", "cast": "{0}", "expand": "{0}",
}  # fmt: skip
FUNCTIONS = {
    "exp": "tl.exp({0})", "log": "tl.log({0})", "rsqrt": "tl.rsqrt({0})", "erf": "tl.erf({0})",
    "floor": "tl.floor({0})", "pow": "power({0}, {1})", "tanh": "tanh({0})", "sin": "sin({0})",
    "cos": "cos({0})", "sigmoid": "sigmoid({0})", "relu": "relu({0})", "silu": "silu({0})",
    "gelu": "gelu({0})", "gelu_tanh": "gelu_tanh({0})", "softplus": "softplus({0})",
    "floordiv": "tl.floor(tl.div_rn({0}, {1}))", "mod": "{0} - tl.floor(tl.div_rn({0}, {1})) * {1}",
}  # fmt: skip
WHOLE = {"floordiv": "floor_quotient({0}, {1})", "mod": "floor_rest({0}, {1})"}
POWERS = {2.0: "{0} * {0}", 3.0: "{0} * {0} * {0}", 0.5: "tl.sqrt({0})", -0.5: "tl.rsqrt({0})", 1.0: "{0}"}


@dataclass(frozen=True)
class Array:
    """An operand: [i, j, ..] is its element start + i * first + j * strides[0] + .."""

    pointer: LaunchArg
    first: int
    strides: tuple[int, ...]
    start: int = 0


def launch_loop(
    ctx: Context,
    stem: str,
    shape: Sequence[Dim],
    arrays: dict[str, Array],
    print_steps: Callable[[Tile], list[str]],
    about: str = "",
) -> list[Case]:
    """A kernel over `shape` whose parameters are `arrays`. print_steps: its statements. about: what they do,
    if the stem does not say it."""
    rows = expression(shape[0]) if shape else 1
    axes = merged_axes(shape[1:], {name: a.strides for name, a in arrays.items()})
    tile = Tile(arrays, axes)
    comment = f"# A program works on a tile of rows of {tile.width}: {about or stem}."
    body = [comment, *tile.indices(), *print_steps(tile)]
    size = row_tile(ctx.device, tile.width)
    launch = ctx.launch(
        stem,
        "\n".join(body),
        {**{name: a.pointer for name, a in arrays.items()}, "rows": ctx.size(rows)},
        (cdiv(rows, size.rows), cdiv(tile.width, size.block)),
        {"ROWS": size.rows, "BLOCK": size.block},
        num_warps=size.num_warps,
    )
    return always(launch)


@dataclass(frozen=True)
class Tile:
    """Spells where a program's elements are. axes: those after the first, merged (codegen.loops)."""

    arrays: dict[str, Array]
    axes: list[tuple[int, dict[str, int]]]

    @property
    def width(self) -> int:
        width = 1
        for count, _ in self.axes:
            width *= count
        return width

    def indices(self) -> list[str]:
        """Statements that name rows, columns, and the columns' index along each axis."""
        lines = [
            "row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]",
            "column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]",
        ]
        inner = self.width
        for index, (count, _) in enumerate(self.axes if len(self.axes) > 1 else []):
            inner //= count
            quotient = "column" if inner == 1 else f"column // {inner}"
            lines.append(f"i{index} = {quotient}{f' % {count}' if index else ''}")
        return lines

    def load(self, name: str) -> str:
        at, mask = self._at(name)
        return f"tl.load({at}, mask={mask})" if mask else f"tl.load({at})"

    def store(self, name: str, value: str) -> str:
        at, mask = self._at(name)
        return f"tl.store({at}, {value}, mask={mask})" if mask else f"tl.store({at}, {value})"

    def _at(self, name: str) -> tuple[str, str]:
        """(address, mask) of an operand's elements; what broadcasts along an axis has no index there."""
        array = self.arrays[name]
        terms, masks = [name], []
        if array.start:
            terms.append(str(array.start))
        if array.first:
            terms.append(_times("row", array.first))
            masks.append("row < rows")
        names = [f"i{i}" for i in range(len(self.axes))] if len(self.axes) > 1 else ["column"]
        inner = [_times(i, own[name]) for i, (_, own) in zip(names, self.axes, strict=False) if own[name]]
        if inner:
            masks.append(f"column < {self.width}")
        mask = " & ".join(f"({m})" for m in masks) if len(masks) > 1 else "".join(masks)
        return " + ".join(terms + inner), mask


def _times(index: str, stride: int) -> str:
    return index if stride == 1 else f"{index} * {stride}"


# --- pointwise groups


def pointwise(ctx: Context, kernel: Kernel) -> list[Case]:
    """One kernel for a group. Raises CodegenError where an op has no spelling."""
    shape = shape_of(kernel.ops[0].out)
    made = {o.name for op in kernel.ops for o in op.outs}
    names: dict[str, str] = {}  # of operands and results in the kernel, by key
    arrays: dict[str, Array] = {}
    operands = [a for op in kernel.ops for a in op.args if isinstance(a, Value | Weight)]
    for arg in operands:
        if isinstance(arg, Weight) or arg.name not in made:
            names.setdefault(_key(arg), f"a{len(names)}")
            arrays.setdefault(names[_key(arg)], _array(ctx, arg, shape))
    results = [op.out for op in kernel.ops if op.out.name not in kernel.inside]
    targets = {out.name: f"y{index}" for index, out in enumerate(results)}
    arrays |= {targets[out.name]: _array(ctx, out, shape) for out in results}
    inputs = {_key(a): a for a in operands if _key(a) in names}

    def steps(tile: Tile) -> list[str]:
        lines, held = [], {}
        for index, (key, arg) in enumerate(inputs.items()):
            held[key] = f"x{index}"
            lines.append(f"x{index} = {_widened(tile.load(names[key]), dtype_of(arg))}")
        for op in kernel.ops:
            held[_key(op.out)] = f"t{len(held)}"
            lines.append(f"{held[_key(op.out)]} = {_spelled(op, held)}")
        for out in results:
            lines.append(tile.store(targets[out.name], _stored(held[_key(out)], dtype_of(out))))
        return lines

    kinds = ", ".join(op.kind for op in kernel.ops)
    return launch_loop(ctx, "pointwise", shape, arrays, steps, kinds)


def _array(ctx: Context, arg: Value | Weight, shape: Sequence[Dim]) -> Array:
    first, strides = operand_strides(tensor_of(arg), shape, ctx.ld(arg))
    return Array(ctx.pointer(arg), first, strides)


def _key(arg: Value | Weight) -> str:
    """A name that values and weights do not share."""
    return f"{'@' if isinstance(arg, Weight) else '%'}{arg.name}"


def _widened(text: str, dtype: DType) -> str:
    """A loaded element as it is held."""
    if dtype is DType.BOOL:
        return f"{text} != 0"
    return f"{text}.to(tl.float32)" if dtype in NARROW else text


def _stored(name: str, dtype: DType) -> str:
    return f"{name}.to(tl.uint8)" if dtype is DType.BOOL else name


def _spelled(op: Op, held: dict[str, str]) -> str:
    try:
        return spell(op, held)
    except NoKernel as error:
        raise refuse(op, str(error)) from None


def spell(op: Op, held: dict[str, str]) -> str:
    """An op's result as an expression of its operands' names. Raises NoKernel."""
    dtype = dtype_of(op.out)
    types = [dtype_of(a) for a in op.args if isinstance(a, Value | Weight)]

    def term(arg: Arg) -> str:
        if isinstance(arg, Scalar):
            number = _number(arg.value, types[-1])
            return f"tl.full([], {number}, tl.float64)" if op.kind == "pow" else number
        return held[_key(cast("Value | Weight", arg))]

    text = _clamped(op, term) if op.kind == "clamp" else _form(op, types).format(*map(term, op.args))
    if op.kind == "cast":
        return _cast(text, types[0], dtype)
    return _rounded(text, dtype)


def _form(op: Op, types: list[DType]) -> str:
    """The spelling of an op's kind for its operands' types."""
    exponent = op.args[1] if op.kind == "pow" else None
    known = POWERS.get(float(exponent.value)) if isinstance(exponent, Scalar) else None
    whole = types[-1].is_integer
    if known is not None and not (whole and "tl." in known):
        return known
    if DType.BOOL in types and op.kind in ("lt", "le", "gt", "ge", "maximum", "minimum"):
        raise NoKernel("booleans have no order at run time: cast them to integers")
    if op.kind in OPERATORS:
        return OPERATORS[op.kind]
    if whole and op.kind in WHOLE:
        return WHOLE[op.kind]
    if op.kind not in FUNCTIONS or whole:
        raise NoKernel("it has no spelling in a pointwise kernel for these types")
    if DType.F64 in types:
        raise NoKernel(f"{op.kind} of f64 values is not computed at run time: cast to f32")
    return FUNCTIONS[op.kind]


def _clamped(op: Op, term: Callable[[Arg], str]) -> str:
    text = term(op.args[0])
    for name, kind in (("low", "maximum"), ("high", "minimum")):
        if op.attr(name) is not None:
            text = OPERATORS[kind].format(text, term(Scalar(op.attr(name))))
    return text


def _number(value: bool | int | float, beside: DType) -> str:
    if isinstance(value, bool):
        return str(value)
    return literal(float(value)) if beside.is_float else literal(value)


def _cast(text: str, source: DType, to: DType) -> str:
    if to is DType.BOOL:
        return f"{text} != 0"
    if to in NARROW:
        return _rounded(f"{text}.to(tl.float32)", to)
    return f"{text}.to({TYPES[to]})"


def _rounded(text: str, dtype: DType) -> str:
    """A result rounded to a type that is held wider."""
    return f"({text}).to({TYPES[dtype]}).to(tl.float32)" if dtype in NARROW else text
