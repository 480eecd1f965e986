"""The verifier: a graph is well formed, its types are those inferred, and KV states are used linearly."""

from __future__ import annotations

from collections.abc import Iterator

from ir.build import infer
from ir.dims import free_names
from ir.graph import Graph, Op, Value, Weight
from ir.ops import OPS, InferError
from ir.text.printer import print_arg, print_graph, print_op, print_type
from ir.types import KV, Tensor, Type

CONTEXT_LINES = 3


class VerifyError(ValueError):
    """The graph is not valid. `op` is the first bad op (None: the header or the outputs)."""

    def __init__(self, graph: Graph, op: Op | None, message: str) -> None:
        self.op = op
        self.reason = message
        super().__init__(f"graph @{graph.name}: {message}\n{point_at(graph, op, message)}")


def verify(graph: Graph) -> None:
    """Raise VerifyError at the first op that breaks a rule."""
    _Verifier(graph).run()


def point_at(graph: Graph, op: Op | None, message: str) -> str:
    """The graph's text around an op, with an arrow under it."""
    if op is None:
        return print_graph(graph).split("\n", 1)[0]
    index = next(i for i, candidate in enumerate(graph.ops) if candidate is op)
    shown = range(max(0, index - CONTEXT_LINES), min(len(graph.ops), index + CONTEXT_LINES + 1))
    lines: list[str] = ["  ..."] if shown.start else []
    for i in shown:
        lines.append(f"  {print_op(graph.ops[i])}")
        if i == index:
            lines.append(f"  ^^^ {message}")
    return "\n".join([*lines, "  ..."] if shown.stop < len(graph.ops) else lines)


class _Verifier:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._defined: dict[str, Value] = {}
        self._weights: dict[str, Weight] = {}
        self._overwritten: dict[str, Op] = {}

    def run(self) -> None:
        for value in self._graph.inputs:
            self._define(None, value)
        for op in self._graph.ops:
            self._operands(op)
            self._types(op)
            self._state(op)
            for value in op.outs:
                self._define(op, value)
        for value in self._graph.outputs:
            if self._defined.get(value.name) != value:
                self._fail(None, f"output %{value.name} is not defined")

    def _fail(self, op: Op | None, message: str) -> None:
        raise VerifyError(self._graph, op, message)

    def _define(self, op: Op | None, value: Value) -> None:
        if value.name in self._defined:
            self._fail(op, f"%{value.name} is defined twice")
        for name in _symbols(value.type):
            if name not in self._graph.dims:
                self._fail(op, f"%{value.name} has the size {name}, which the graph gives no bounds for")
        self._defined[value.name] = value

    def _operands(self, op: Op) -> None:
        if "\n" in op.loc:
            self._fail(op, "the loc holds a line break")
        for arg in op.args:
            if isinstance(arg, Value) and self._defined.get(arg.name) != arg:
                known = self._defined.get(arg.name)
                what = (
                    "is not defined before this op" if known is None else f"has type {print_type(known.type)}"
                )
                self._fail(op, f"operand %{arg.name} {what}")
            if isinstance(arg, Weight) and self._weights.setdefault(arg.name, arg) != arg:
                self._fail(op, f"{print_arg(arg)} was {print_arg(self._weights[arg.name])} before")

    def _types(self, op: Op) -> None:
        try:
            expected = infer(op.kind, op.args, op.attrs)
        except InferError as e:
            self._fail(op, str(e))
            return
        found = tuple(v.type for v in op.outs)
        if expected != found:
            self._fail(op, f"result types are {_types(found)}, but the operands give {_types(expected)}")

    def _state(self, op: Op) -> None:
        """A KV state is read only until it is written, and written once."""
        for value in op.values:
            if isinstance(value.type, KV) and value.name in self._overwritten:
                writer = self._overwritten[value.name]
                self._fail(
                    op, f"%{value.name} was overwritten by %{writer.outs[0].name} and cannot be used again"
                )
        if OPS[op.kind].rollback is not None and isinstance(op.args[0], Value):
            self._overwritten[op.args[0].name] = op


def _types(types: tuple[Type, ...]) -> str:
    return ", ".join(print_type(t) for t in types)


def _symbols(type: Type) -> Iterator[str]:
    if isinstance(type, Tensor):
        for dim in type.shape:
            yield from free_names(dim)
