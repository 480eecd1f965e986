"""What kernel printers see: where values lie, how pointers and strides are spelled, what weights are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from codegen.cpp.masks import mask_struct
from codegen.cpp.quantized import Matrix
from codegen.cpp.spelling import ctype, identifier, size
from codegen.cpp.weights import WeightTable
from codegen.errors import CodegenError as CodegenError
from codegen.operands import dtype_of as dtype_of
from codegen.operands import kv_groups
from codegen.operands import shape_of as shape_of
from ir.dims import product
from ir.graph import Arg, Graph, Op, Scalar, Value, Weight
from ir.types import DType, Tensor
from passes.memory.places import Place
from passes.memory.schedule import Schedule

STEP_INPUTS = ("ids", "pos", "lens", "starts", "rows")


@dataclass
class Context:
    schedule: Schedule
    weights: WeightTable
    buffer: dict[str, int]  # value name -> buffer of the arena
    identifiers: dict[str, str]
    kv_group: dict[str, int]  # KV value name -> group
    functions: dict[str, str] = field(default_factory=dict[str, str])  # text -> name
    structs: dict[str, str] = field(default_factory=dict[str, str])
    used: set[int] = field(default_factory=set[int])  # packed arrays that were spelled, until it is cleared

    @staticmethod
    def of(graph: Graph) -> Context:
        buffer = {o.name: op.attr("at")[i] for op in graph.ops for i, o in enumerate(op.outs)}
        return Context(Schedule.of(graph), WeightTable(), buffer, _identifiers(graph), kv_groups(graph))

    @property
    def graph(self) -> Graph:
        return self.schedule.graph

    @property
    def places(self) -> Mapping[str, Place]:
        return self.schedule.places

    def is_constant(self, arg: Arg) -> bool:
        return isinstance(arg, Weight) or (isinstance(arg, Value) and arg.name in self.schedule.constants)

    def weight(self, arg: Value | Weight, layout: str = "plain", experts: int = 1) -> str:
        """Pointer to a packed array."""
        index, packed = self.weights.use(arg, layout, experts)
        self.used.add(index)
        return f"weight<{ctype(packed.dtype)}>(weights, {index})"

    def matrix(self, matrix: Matrix, layout: str, experts: int = 1) -> str:
        """Pointer to a packed quantised matrix."""
        index = self.weights.use_matrix(matrix, layout, experts)
        self.used.add(index)
        return f"weight<{ctype(DType.U8)}>(weights, {index})"

    def pointer(self, arg: Arg) -> str:
        """Pointer to an operand's first element, or nullptr for one that is absent."""
        if arg is None:
            return "nullptr"
        assert not isinstance(arg, Scalar)
        if self.is_constant(arg):
            return self.weight(arg)
        place = self.places[arg.name]
        offset = "" if place.offset == 0 else f" + {size(place.offset)}"
        return self.identifiers[place.root] + offset

    def scratch(self, op: Op) -> str:
        """Pointer to an op's scratch space."""
        return f"{self.identifiers[op.outs[0].name]}_scratch"

    def ld(self, arg: Arg) -> str:
        """Elements from one row of an operand to the next."""
        if arg is None:
            return "0"
        assert isinstance(arg, Value | Weight)
        return str(product(shape_of(arg)[1:])) if self.is_constant(arg) else size(self.places[arg.name].ld)

    def is_contiguous(self, arg: Value) -> bool:
        return self.is_constant(arg) or self.places[arg.name].ld == product(shape_of(arg)[1:])

    def function(self, text: str, stem: str) -> str:
        """The name of a generated function; equal texts are one function."""
        if text not in self.functions:
            self.functions[text] = f"{stem}_{len(self.functions)}"
        return self.functions[text]

    def mask(self, predicate: object, columns: tuple[int, ...]) -> str:
        text = mask_struct("NAME", predicate, columns)
        if text not in self.structs:
            self.structs[text] = f"Mask{len(self.structs)}"
        return self.structs[text]


def refuse(op: Op, reason: str) -> CodegenError:
    return CodegenError(f"no C++ kernel for {op.kind}: {reason}", op)


def needs(op: Op, *allowed: DType) -> None:
    """Raises CodegenError where an operand or result has another element type."""
    for arg in (*op.args, *op.outs):
        if isinstance(arg, Value | Weight) and isinstance(arg.type, Tensor) and arg.type.dtype not in allowed:
            raise refuse(op, f"an operand of type {arg.type.dtype}; there is {', '.join(allowed)}")


def _identifiers(graph: Graph) -> dict[str, str]:
    """A C++ identifier for each value, all different."""
    found: dict[str, str] = {}
    used: set[str] = set()
    for value in (*graph.inputs, *(o for op in graph.ops for o in op.outs)):
        base = name = identifier(value.name)
        while name in used:
            name = f"{base}_{len(used)}"
        used.add(name)
        found[value.name] = name
    return found
