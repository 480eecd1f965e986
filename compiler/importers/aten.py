"""An exported ATen graph -> the IR.

`import_program` walks the nodes in order; each call is looked up in one literal table (`CONVERTERS`) of
functions that emit IR ops. FakeTensor shapes become symbolic sizes, module stacks become `loc`, and what an
op gives is checked against the shape that torch says it has, so that a converter that is wrong fails here
and not later.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.importers import (
    aten_choose,
    aten_complex,
    aten_linear,
    aten_pointwise,
    aten_shape,
    aten_sorted,
)
from compiler.importers.aten_complex import Pair
from compiler.importers.context import Context, source_line, torch_dtype
from compiler.importers.refused import OTHER_OPS, ImportRefused
from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Arg, Graph, Scalar, Value, Weight
from ir.ops import InferError
from ir.types import DType, Tensor

Converter = Callable[..., Any]

# What torch's decompositions end in, by ATen's ops of the same meaning.
_PRIMS = {
    **{f"prims.{name}.default": f"aten.{name}.Tensor" for name in ("add", "sub", "mul", "div")},
    **{f"prims.{name}.default": f"aten.{name}.Tensor" for name in ("lt", "le", "gt", "ge", "eq", "ne")},
    **{
        f"prims.{name}.default": f"aten.{name}.default"
        for name in ("abs", "amax", "exp", "log", "maximum", "minimum", "neg", "rsqrt", "sqrt", "tanh")
    },
    "prims.convert_element_type.default": "aten._to_copy.default",
    "prims.pow.default": "aten.pow.Tensor_Tensor",
    "prims.sum.default": "aten.sum.dim_IntList",
    "prims.var.default": "aten.var.correction",
    "prims.where.default": "aten.where.self",
}
_ATEN: dict[str, Converter] = {**aten_pointwise.TABLE, **aten_shape.TABLE, **aten_linear.TABLE}

CONVERTERS: dict[str, Converter] = {
    **{prim: _ATEN[name] for prim, name in _PRIMS.items()},
    **aten_pointwise.TABLE,
    **aten_shape.TABLE,
    **aten_linear.TABLE,
    **aten_choose.TABLE,
    **aten_sorted.FROM_PLAIN,
    **aten_complex.FROM_REAL,
}

DROPPED = frozenset(
    {
        "aten._assert_tensor_metadata.default",
        "aten._assert_scalar.default",
        "aten._assert_async.msg",
        "aten.sym_constrain_range_for_size.default",
        "aten.sym_constrain_range.default",
    }
)  # checks of what the types already say; they have no result

SUPPORTED = (
    frozenset(CONVERTERS) | frozenset(aten_complex.ON_COMPLEX) | DROPPED | {"aten.sym_size.int"}
)  # what an export need not decompose


@dataclass(frozen=True)
class Program:
    """What import_program needs of an exported program.

    placeholders: what each stands for, by node name: a weight, a literal, or the name of a graph input.
    context: the largest S.
    prefix: module path of the wrapper that was exported, left out of every `loc`.
    """

    nodes: Any
    placeholders: Mapping[str, Weight | Scalar | Pair | str]
    context: int
    name: str
    prefix: str = ""


def import_program(program: Program, lines: dict[str, str] | None = None) -> Graph:
    """The graph in imported form. Raises ImportRefused, naming the op and where it is.

    lines: gets the line of the model's source that each value comes from, by the value's name.
    """
    size = symbol("S")
    inputs = (Value("ids", Tensor(DType.I32, (1, size))), Value("pos", Tensor(DType.I32, (1, size))))
    build = GraphBuilder(program.name, {"S": (1, program.context)}, inputs)
    walk = _Walk(program, build, {v.name: v for v in inputs})
    nodes = list(program.nodes)
    dead = _dead(nodes)
    for node in (n for n in nodes if n not in dead):
        start = len(build.ops)
        try:
            walk.visit(node)
        except ImportRefused as refused:
            refused.reached = _so_far(build)
            raise
        if lines is not None and (line := source_line(node)):
            lines.update((out.name, line) for op in build.ops[start:] for out in op.outs)
    return build.graph((walk.logits(),))


def _dead(nodes: Sequence[Any]) -> set[Any]:
    """Calls that only check something, and those without side effects whose results nothing reads."""
    read = set[Any]()
    found = set[Any]()
    for node in reversed(nodes):
        schema = getattr(node.target, "_schema", None)
        pure = getattr(node.target, "__name__", "") == "getitem" or (schema and not schema.is_mutable)
        if node.op == "call_function" and (str(node.target) in DROPPED or (node not in read and pure)):
            found.add(node)
        else:
            read.update(node.all_input_nodes)
    return found


def _so_far(build: GraphBuilder) -> Graph:
    """The ops up to a refusal; what none of them reads is their output."""
    read = {v.name for op in build.ops for v in op.values}
    return build.graph([out for op in build.ops for out in op.outs if out.name not in read])


class _Walk:
    """The state of one walk: what each node of the exported graph became."""

    def __init__(self, program: Program, build: GraphBuilder, inputs: Mapping[str, Value]) -> None:
        self.program, self.build, self.inputs = program, build, inputs
        self.found: dict[Any, Any] = {}
        self.limits: dict[str, tuple[int, int]] = {"pos": (0, program.context - 1)}
        self.constant: set[str] = set()
        self.result: Any = None

    def visit(self, node: Any) -> None:
        if node.op == "placeholder":
            given = self.program.placeholders[node.name]
            self.found[node] = self.inputs[given] if isinstance(given, str) else given
        elif node.op == "output":
            self.result = node.args[0][0]
        elif node.op == "call_function":
            self.call(node)
        else:
            what = f"a {node.op} node {node.name!r} cannot be imported"
            raise ImportRefused(what, where="exported program", todo=OTHER_OPS)

    def call(self, node: Any) -> None:
        target = str(node.target)
        loc = module_path(node, self.program.prefix)
        if target in DROPPED:
            return
        if _is_symbolic_scalar(node):
            return  # read from the node's own meta where it is used
        if getattr(node.target, "__name__", "") == "getitem":
            self.found[node] = self.found[node.args[0]][node.args[1]]
            return
        context = Context(self.build, node, loc, self.program.context, self.limits, self.constant)
        try:
            if any(aten_sorted.holds(self.found.get(n)) for n in node.all_input_nodes):
                args = [self.unresolved(a) for a in node.args]
                self.found[node] = aten_sorted.convert(context, target, args, dict(node.kwargs))
                return
            args = [self.resolve(a, context) for a in node.args]
            kwargs = {k: self.resolve(v, context) for k, v in node.kwargs.items()}
            table = aten_complex.ON_COMPLEX if aten_complex.is_complex(args) else CONVERTERS
            if target not in table:
                kind = " for complex numbers" if table is aten_complex.ON_COMPLEX else ""
                raise ImportRefused(f"this op has no converter{kind}")
            self.found[node] = table[target](context, *args, **kwargs)
            _check_shape(context, node, self.found[node])
        except (ImportRefused, InferError, TypeError, ValueError) as error:
            what, todo = getattr(error, "what", str(error)), getattr(error, "todo", "")
            refused = ImportRefused(what, where=where(node, target, loc), todo=todo or OTHER_OPS)
            raise refused.at(target, loc, source_line(node)) from error

    def resolve(self, arg: Any, context: Context) -> Any:
        """Operands as IR operands, sizes as dims, lists as lists."""
        if isinstance(arg, list | tuple):
            return [self.resolve(a, context) for a in arg]
        if not hasattr(arg, "op") or not hasattr(arg, "meta"):
            return arg
        if arg in self.found:
            return self.found[arg]
        value = arg.meta["val"]
        if hasattr(value, "node") and type(value).__name__ == "SymInt":
            return context.dim(value)
        return context.symbolic_float(arg)

    def unresolved(self, arg: Any) -> Any:
        """Operands as what they became; a number that is read from a tensor stays a node."""
        if isinstance(arg, list | tuple):
            return [self.unresolved(a) for a in arg]
        return self.found.get(arg, arg) if hasattr(arg, "meta") else arg

    def logits(self) -> Value:
        value = self.found[self.result]
        if not isinstance(value, Value) or not isinstance(value.type, Tensor) or value.type.rank != 3:
            what = f"the model must give logits [1,S,V], not {value!r}"
            raise ImportRefused(what, where="output", todo="Return them from its forward")
        if value.type.dtype is not DType.F32:
            value = self.build.op("cast", value, dtype="f32", name="logits")
        return self._named_logits(value)

    def _named_logits(self, value: Value) -> Value:
        """The output under the name `logits`: the last op is renamed unless something else reads it."""
        last = self.build.ops[-1]
        if value.name == "logits" or last.outs != (value,):
            return value
        renamed = Value(self.build.unique("logits"), value.type)
        self.build.ops[-1] = type(last)(last.kind, last.args, last.attrs, (renamed,), last.loc)
        return renamed


def _is_symbolic_scalar(node: Any) -> bool:
    return type(node.meta.get("val")).__name__ in ("SymInt", "SymFloat", "SymBool", "int", "float", "bool")


def _check_shape(context: Context, node: Any, given: Any) -> None:
    expected = node.meta.get("val")
    pairs = zip(expected, given, strict=True) if isinstance(expected, list | tuple) else [(expected, given)]
    for fake, arg in pairs:
        if isinstance(arg, Pair):
            _check_complex(context, fake, arg)
            continue
        if "complex" in str(getattr(fake, "dtype", "")):
            raise ImportRefused("gives complex numbers, which it cannot be converted to")
        shape = tuple(context.dim(n) for n in fake.shape)
        if isinstance(arg, Value | Weight) and isinstance(arg.type, Tensor) and arg.type.shape != shape:
            raise ImportRefused(f"gives {list(arg.type.shape)} where torch has {list(shape)}")
        if isinstance(arg, Value | Weight) and isinstance(arg.type, Tensor):
            _check_dtype(arg.type.dtype, fake.dtype)


def _check_complex(context: Context, fake: Any, pair: Pair) -> None:
    shape = tuple(context.dim(n) for n in fake.shape)
    for part in pair.parts:
        if context.type(part).shape != shape or context.type(part).dtype is not DType.F32:
            raise ImportRefused(f"gives {context.type(part)} where torch has {list(shape)} of {fake.dtype}")


def _check_dtype(given: DType, fake: Any) -> None:
    if given is not torch_dtype(fake):
        raise ImportRefused(f"gives {given} where torch has {torch_dtype(fake)}")


def module_path(node: Any, prefix: str = "") -> str:
    """The path of the innermost module that a node came from; "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next((str(p) for p, _ in reversed(stack.values())), "")
    path = re.sub(r"\.slice\([^)]*\)", "", path.removeprefix("L['self']").lstrip("."))
    return path.removeprefix(prefix).lstrip(".")


def where(node: Any, target: str, loc: str) -> str:
    source = source_line(node)
    return f"{target} in {loc or 'the model'}{f' ({source})' if source else ''}"


__all__ = ["CONVERTERS", "SUPPORTED", "Arg", "Program", "import_program", "module_path"]
