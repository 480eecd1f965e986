"""Choose the element types of weights, as explicit `cast` weight ops.

Matrices of linears and embedding tables get `dtype`, but for those that are dequantised: in memory they are
codes. Every other weight is computed with in f32, whatever the checkpoint stores. A 16-bit float is held
exactly by f32. Activations keep their type.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ir.build import GraphBuilder, infer
from ir.graph import Arg, Graph, Op, Value, Weight
from ir.ops import InferError
from ir.types import DType, Type
from passes.base import BF16_ERROR, Pass, Result
from passes.linears import LINEARS
from passes.match import dtype as dtype_of
from passes.match import tensor
from passes.rows_of import code_format

_MATRIX_OPS = (*LINEARS, "embed")  # their operand 1 is the matrix
_NARROW = (DType.F16, DType.BF16)


@dataclass(frozen=True)
class ConvertWeights(Pass):
    """dtype: "f32" or "bf16"."""

    dtype: str = "f32"

    def __post_init__(self) -> None:
        if self.dtype not in ("f32", "bf16"):
            raise ValueError(f"convert_weights: dtype must be f32 or bf16, not {self.dtype!r}")

    @property
    def tolerance(self) -> float:
        return BF16_ERROR if self.dtype == "bf16" else 0.0

    def run(self, graph: Graph) -> Result:
        return _Converter(graph, DType(self.dtype)).run()


class _Converter:
    """Builds the graph anew; ops on weights alone take the types of their new operands."""

    def __init__(self, graph: Graph, matrix: DType) -> None:
        self.graph, self.matrix = graph, matrix
        self.constants, self.makers = graph.constants(), graph.producers()
        self.build = GraphBuilder(graph.name, graph.dims, graph.inputs)
        self.now: dict[str, Arg] = {}
        self.casts: dict[tuple[Arg, DType], Value] = {}
        self.build.reserve(self.makers)

    def run(self) -> Result:
        for op in self.graph.ops:
            if op.kind in _MATRIX_OPS and self.is_constant(op.args[1]) and not self.is_coded(op.args[1]):
                self.matrix_op(op)
            else:
                self.other_op(op)
        after = replace(self.build.graph(self.graph.outputs), arena=self.graph.arena)
        return Result(after, len(self.casts))

    def is_constant(self, arg: Arg) -> bool:
        return isinstance(arg, Weight) or (isinstance(arg, Value) and arg.name in self.constants)

    def is_coded(self, arg: Arg) -> bool:
        """Whether it is dequantised from codes of one format, which fuse_dequant folds into what reads it."""
        return bool(code_format(self.makers, arg))

    def matrix_op(self, op: Op) -> None:
        """The matrix gets the wanted type (from the weight itself where nothing was computed with it)."""
        found = op.args[1]
        matrix = self.cast(found if isinstance(found, Weight) else self.wide(found), self.matrix)
        args = (self.wide(op.args[0]), matrix, *(self.wide(a) for a in op.args[2:]))
        attrs = dict(op.attrs)
        if op.kind == "embed" and dtype_of(op.out) is not dtype_of(matrix):
            attrs["dtype"] = str(dtype_of(op.out))
        self.build.ops.append(replace(op, args=args, attrs=attrs))

    def other_op(self, op: Op) -> None:
        """In f32; where an op cannot be computed so (it is on 16-bit activations), with the types it had."""
        if op.kind == "dequantize":  # scales stay as narrow as they are stored
            self.build.ops.append(op.reading(self.now))
            return
        args = tuple(self.wide(a) for a in op.args)
        constant = op.outs[0].name in self.constants
        types = self.types(op, args)
        if types is None or (not constant and types != tuple(o.type for o in op.outs)):
            args = tuple(self.as_before(new, old) for new, old in zip(args, op.args, strict=True))
            types = tuple(o.type for o in op.outs)
        if op.kind == "cast" and constant and tensor(args[0]) in types:
            self.now[op.out.name] = args[0]
            return
        outs = tuple(Value(o.name, t) for o, t in zip(op.outs, types, strict=True))
        self.now.update({o.name: o for o in outs})
        self.build.ops.append(replace(op, args=args, outs=outs))

    @staticmethod
    def types(op: Op, args: tuple[Arg, ...]) -> tuple[Type, ...] | None:
        try:
            return infer(op.kind, args, op.attrs)
        except InferError:
            return None

    def wide(self, arg: Arg) -> Arg:
        """An operand as it is now, a 16-bit weight as f32."""
        if isinstance(arg, Value):
            return self.now.get(arg.name, arg)
        return self.cast(arg, DType.F32) if isinstance(arg, Weight) and dtype_of(arg) in _NARROW else arg

    def as_before(self, new: Arg, old: Arg) -> Arg:
        if isinstance(old, Weight):
            return old
        kind = dtype_of(old)
        return new if kind is None or kind is dtype_of(new) else self.cast(new, kind)

    def cast(self, arg: Arg, to: DType) -> Arg:
        if dtype_of(arg) is to:
            return arg
        if (arg, to) not in self.casts:
            hint = arg.name if isinstance(arg, Value | Weight) else ""
            self.casts[arg, to] = self.build.op("cast", arg, dtype=str(to), name=f"{hint}.{to}")
        return self.casts[arg, to]
