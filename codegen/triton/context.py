"""What printers of Triton kernels see: where operands lie, and the module that their functions go into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import sympy

from codegen.errors import CodegenError as CodegenError
from codegen.operands import dtype_of as dtype_of
from codegen.operands import kv_groups
from codegen.operands import shape_of as shape_of
from codegen.triton.devices import Device
from codegen.triton.launch import Arg, Constant, Expr, Launch, expression
from codegen.triton.module import Module
from codegen.triton.weights import CODES, WeightTable
from ir.dims import Dim, normalize, product
from ir.graph import Arg as Operand
from ir.graph import Graph, Op, Value, Weight
from ir.ops import OPS
from ir.types import DType, Tensor
from passes.memory.places import Place
from passes.memory.schedule import Schedule

POINTERS: dict[DType, str] = {
    DType.F32: "*fp32", DType.BF16: "*bf16", DType.F16: "*fp16", DType.F64: "*fp64", DType.I64: "*i64",
    DType.I32: "*i32", DType.I8: "*i8", DType.U8: "*u8", DType.BOOL: "*u8", DType.F8E4M3: "*u8",
    DType.U4: "*u8", DType.U2: "*u8",
}  # fmt: skip
TYPES: dict[DType, str] = {
    DType.F64: "tl.float64", DType.F32: "tl.float32", DType.BF16: "tl.bfloat16", DType.F16: "tl.float16",
    DType.I64: "tl.int64", DType.I32: "tl.int32", DType.I8: "tl.int8", DType.U8: "tl.uint8",
    DType.BOOL: "tl.int1",
}  # fmt: skip
FLOATS = (DType.F32, DType.BF16, DType.F16)  # that kernels widen to f32 and compute in
ALIGNMENT = 16
MAX_ARGS = 510  # of 8 bytes in CUDA's 4 KiB, where Triton adds two pointers


@dataclass
class Context:
    """invariant: one tile shape and one order of accumulation, whatever the step."""

    device: Device
    schedule: Schedule
    module: Module
    weights: WeightTable
    kv_group: Mapping[str, int]  # KV value name -> group
    buffer: Mapping[str, int]  # value name -> buffer of the arena
    invariant: bool = False

    @staticmethod
    def of(graph: Graph, device: Device, invariant: bool = False) -> Context:
        buffer = {o.name: op.attr("at")[i] for op in graph.ops for i, o in enumerate(op.outs)}
        module = Module(device)
        return Context(device, Schedule.of(graph), module, WeightTable(), kv_groups(graph), buffer, invariant)

    @property
    def graph(self) -> Graph:
        return self.schedule.graph

    @property
    def places(self) -> Mapping[str, Place]:
        return self.schedule.places

    # --- operands

    def is_constant(self, arg: Operand) -> bool:
        return isinstance(arg, Weight) or (isinstance(arg, Value) and arg.name in self.schedule.constants)

    def pointer(self, arg: Value | Weight, skip: Dim = 0) -> Arg:
        """An operand's or result's first element, or that `skip` elements on; not in a constant."""
        dtype = dtype_of(arg)
        if self.is_constant(arg):
            index, packed = self.weights.use(arg)
            return Arg((("weight", index),), POINTERS[packed.dtype], True)
        place = self.places[cast(Value, arg).name]
        offset = normalize((sympy.Integer(0) + place.offset + skip) * dtype.size_bytes)
        return self._at(place.root, POINTERS[dtype], offset)

    def codes(self, arg: Value | Weight) -> Arg:
        """A quantised matrix's codes, as they are packed (codegen.triton.weights)."""
        index, packed = self.weights.use(arg, CODES)
        return Arg((("weight", index),), POINTERS[packed.dtype], True)

    def _at(self, root: str, type_: str, offset: Dim) -> Arg:
        aligned = _is_multiple(offset)
        if root in self.schedule.given:
            name = "logits" if root == self.schedule.logits else root
            return Arg((("input", name), ("offset", expression(offset))), type_, aligned)
        return Arg((("buffer", self.buffer[root]), ("offset", expression(offset))), type_, aligned)

    def scratch(self, op: Op, type_: str = "*fp32", offset: Dim = 0) -> Arg:
        """An op's scratch space (passes.memory.sizes.scratch_bytes), `offset` bytes into it."""
        place = (("buffer", op.attr("at")[-1]), ("offset", expression(offset)))
        return Arg(place, type_, _is_multiple(offset))

    def cache(self, state: Value, offset: int, type_: str) -> Arg:
        """A KV group's pool, `offset` bytes into its first block (codegen.kv_block)."""
        place = (("input", f"kv{self.kv_group[state.name]}"), ("offset", offset))
        return Arg(place, type_, offset % ALIGNMENT == 0)

    def given(self, name: str, type_: str = "*i32", offset: int = 0) -> Arg:
        """An array that the runtime gives by name: the step's, or the sampler's."""
        return Arg((("input", name), ("offset", offset)), type_, offset % ALIGNMENT == 0)

    def size(self, dim: Dim | Expr, type_: str = "i32") -> Arg:
        """An integer that depends on the step, or a constant."""
        found = dim if isinstance(dim, str | tuple) else expression(dim)
        return Arg((("size", found),), type_, isinstance(found, int) and found % ALIGNMENT == 0)

    def ld(self, arg: Value | Weight) -> int:
        """Elements from one row of an operand to the next. Raises CodegenError where a step decides it."""
        found = product(shape_of(arg)[1:]) if self.is_constant(arg) else self.places[cast(Value, arg).name].ld
        if not isinstance(found, int):
            raise CodegenError(
                f"%{arg.name}: rows of {found} elements; only the first axis may depend on a step"
            )
        return found

    def is_contiguous(self, arg: Value | Weight) -> bool:
        return self.is_constant(arg) or self.places[cast(Value, arg).name].ld == product(shape_of(arg)[1:])

    # --- launches

    def launch(
        self,
        stem: str,
        body: str,
        args: Mapping[str, Arg],
        grid: Sequence[Expr],
        constants: Mapping[str, Constant] | None = None,
        *,
        num_warps: int = 4,
        num_stages: int = 2,
    ) -> Launch:
        """A launch of the function whose parameters are `args`, then `constants` (tl.constexpr).

        body: the function's statements (see codegen.triton.render). Equal functions are one, and so are equal
        kernels of it. Raises CodegenError where it has more operands than a device takes.
        """
        if len(args) > MAX_ARGS:
            raise CodegenError(f"a kernel {stem} of {len(args)} operands; a launch takes {MAX_ARGS}")
        constants = constants or {}
        function = self.module.function(stem, [*args], [*constants], body)
        kernel = self.module.kernel(
            function,
            signature=tuple((name, arg.type) for name, arg in args.items()),
            constants=tuple(constants.items()),
            aligned=tuple(name for name, arg in args.items() if arg.aligned),
            num_warps=num_warps,
            num_stages=num_stages,
        )
        return Launch(kernel.name, tuple(grid), tuple(args.values()))


def operands(op: Op) -> dict[str, Value | Weight]:
    """The operands that there are, by the names of their declaration; a bias by its whole name."""
    names = ("bias" if name == "b?" else name.rstrip("?") for name in OPS[op.kind].operands)
    given = zip(names, op.args, strict=False)  # the last ones may be left out
    return {name: cast("Value | Weight", arg) for name, arg in given if arg is not None}


def refuse(op: Op, reason: str) -> CodegenError:
    return CodegenError(f"no Triton kernel for {op.kind}: {reason}", op)


def needs(op: Op, *allowed: DType) -> None:
    """Raises CodegenError where an operand or result has another element type."""
    for arg in (*op.args, *op.outs):
        if isinstance(arg, Value | Weight) and isinstance(arg.type, Tensor) and arg.type.dtype not in allowed:
            raise refuse(op, f"an operand of type {arg.type.dtype}; there is {', '.join(allowed)}")


def literal(value: bool | int | float) -> str:
    """A number as it stands in a kernel, where arithmetic of f32 rounds it to one."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, int):
        return str(value)
    if value != value:
        return 'float("nan")'
    return f'float("{value}")' if value in (float("inf"), float("-inf")) else repr(float(value))


def _is_multiple(offset: Any) -> bool:
    """Whether bytes are a multiple of 16 whatever the step's sizes are."""
    if isinstance(offset, int | sympy.Integer):
        return int(offset) % ALIGNMENT == 0
    terms = cast("dict[Any, Any]", offset.as_coefficients_dict())
    return all(int(c) == c and int(c) % ALIGNMENT == 0 for c in terms.values())


__all__ = [
    "FLOATS", "POINTERS", "TYPES", "CodegenError", "Context", "dtype_of", "literal", "needs", "operands",
    "refuse", "shape_of",
]  # fmt: skip
