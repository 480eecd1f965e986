"""The verifier: a graph is well formed, its types are those inferred, and KV states are used linearly."""

from __future__ import annotations

import re
from typing import Any, NoReturn, cast

from ir.build import infer
from ir.dims import free_names
from ir.graph import Graph, Op, Value, Weight
from ir.ops import OPS, InferError
from ir.ops.base import is_size
from ir.text.expressions import CALLS
from ir.text.printer import print_arg, print_graph, print_op, print_type
from ir.types import CHANNEL, KV, TOKEN, DType, Type

CONTEXT_LINES = 3
MAX_LINE = 2000  # of a message
SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
RESERVED = frozenset({"true", "false", "nan", "inf", *CALLS})


class VerifyError(ValueError):
    """The graph is not valid. op: the first bad one (None: the header or the outputs). shown: the text around
    it, with an arrow."""

    def __init__(self, graph: Graph, op: Op | None, message: str) -> None:
        self.op = op
        self.reason = message = _cut(message)
        self.shown = point_at(graph, op, message)
        super().__init__(f"graph @{_cut(graph.name)}: {message}\n{self.shown}")


def verify(graph: Graph) -> None:
    """Raise VerifyError at the first op that breaks a rule."""
    _Verifier(graph).run()


def point_at(graph: Graph, op: Op | None, message: str) -> str:
    """The graph's text around an op, with an arrow under it."""
    if op is None:
        return _cut(print_graph(graph).split("\n", 1)[0])
    index = next(i for i, candidate in enumerate(graph.ops) if candidate is op)
    shown = range(max(0, index - CONTEXT_LINES), min(len(graph.ops), index + CONTEXT_LINES + 1))
    lines: list[str] = ["  ..."] if shown.start else []
    for i in shown:
        lines.append(f"  {_cut(print_op(graph.ops[i]))}")
        if i == index:
            lines.append(f"  ^^^ {message}")
    return "\n".join([*lines, "  ..."] if shown.stop < len(graph.ops) else lines)


def _cut(line: str) -> str:
    """A line of a length that can be read."""
    return line if len(line) <= MAX_LINE else f"{line[: MAX_LINE - 3]}..."


class _Verifier:
    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._defined: dict[str, Value] = {}
        self._weights: dict[str, Weight] = {}
        self._overwritten: dict[str, Op] = {}

    def run(self) -> None:
        self._bounds()
        for value in self._graph.inputs:
            self._define(None, value)
        for op in self._graph.ops:
            self._operands(op)
            self._types(op)
            self._attributes(op)
            self._state(op)
            for value in op.outs:
                self._define(op, value)
        self._outputs()

    def _fail(self, op: Op | None, message: str) -> NoReturn:
        raise VerifyError(self._graph, op, message)

    def _bounds(self) -> None:
        for name, (low, high) in self._graph.dims.items():
            if not SYMBOL.fullmatch(name) or name in RESERVED:
                self._fail(None, f"{name!r} cannot be the name of a size")
            if low < 0 or (high is not None and high < low):
                self._fail(None, f"the size {name} has the bounds {low}..{high}")

    def _outputs(self) -> None:
        for value in self._graph.outputs:
            shown = print_arg(value)
            if self._defined.get(value.name) != value:
                self._fail(None, f"output {shown} is not defined with type {print_type(value.type)}")
            if value.name in self._overwritten:
                self._fail(self._overwritten[value.name], f"the output {shown} is overwritten here")

    def _define(self, op: Op | None, value: Value) -> None:
        if value.name in self._defined:
            self._fail(op, f"%{value.name} is defined twice")
        self._type(op, print_arg(value), value.type)
        self._defined[value.name] = value

    def _type(self, op: Op | None, shown: str, type: Type) -> None:
        if isinstance(type, KV):
            reason = _why_not_state(type)
            if reason:
                self._fail(op, f"{shown}: {reason}")
            return
        for dim in type.shape:
            if not is_size(dim):
                self._fail(op, f"{shown} has the size {dim}")
            for name in free_names(dim) - self._graph.dims.keys():
                self._fail(op, f"{shown} has the size {name}, which the graph gives no bounds for")

    def _attributes(self, op: Op) -> None:
        """Annotations and names are what the text can hold; sizes in attributes have bounds."""
        for name, value in op.attrs.items():
            if not SYMBOL.fullmatch(name):
                self._fail(op, f"{name!r} cannot be the name of an attribute")
            for item in cast("tuple[Any, ...]", value) if isinstance(value, tuple) else (value,):
                unbound = free_names(item) - self._graph.dims.keys() if is_size(item) else set[str]()
                if unbound:
                    self._fail(op, f"attribute {name}: the graph gives no bounds for {min(unbound)}")
        places = op.attrs.get("at")
        if places is not None and not self._are_places(op, places):
            count = len(self._graph.arena)
            self._fail(op, f"at={places} is not one of {count} buffers, or -1, for each result")

    def _are_places(self, op: Op, places: Any) -> bool:
        found = cast("tuple[Any, ...]", places) if isinstance(places, tuple) else ()
        count = len(self._graph.arena)
        return len(found) >= len(op.outs) and all(type(p) is int and -1 <= p < count for p in found)

    def _operands(self, op: Op) -> None:
        for arg in op.args:
            if isinstance(arg, Value) and self._defined.get(arg.name) != arg:
                known = self._defined.get(arg.name)
                what = (
                    "is not defined before this op" if known is None else f"has type {print_type(known.type)}"
                )
                self._fail(op, f"operand {print_arg(arg)} {what}")
            if isinstance(arg, Weight):
                self._type(op, print_arg(arg), arg.type)
            if isinstance(arg, Weight) and self._weights.setdefault(arg.name, arg) != arg:
                self._fail(op, f"{print_arg(arg)} was {print_arg(self._weights[arg.name])} before")

    def _types(self, op: Op) -> None:
        try:
            expected = infer(op.kind, op.args, op.attrs)
        except InferError as e:
            self._fail(op, str(e))
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


def _why_not_state(kv: KV) -> str:
    """Why a KV type makes no sense; empty if it does."""
    names = [s.name for s in kv.streams]
    if len(set(names)) != len(names) or not all(SYMBOL.fullmatch(n) for n in names):
        return f"the streams {names} must have names, and different ones"
    sizes = [kv.layers, kv.block, *(n for s in kv.streams for n in (s.heads, s.head_size))]
    if min(sizes) < 1 or kv.window == 0:
        return "layers, block, window, heads and head sizes are at least 1"
    if kv.tail and (kv.window is not None or any(s.is_quantized for s in kv.streams)):
        return "a tail has no window, and streams that are not quantised"
    if kv.state and (kv.window is not None or kv.tail or any(s.is_quantized for s in kv.streams)):
        return "a state has no window, is no tail, and its streams are not quantised"
    if any(s.per_block for s in kv.streams) != kv.state:
        return "a stream per block is a state's, which has one"
    if any(s.per not in (TOKEN, CHANNEL) or (s.per == CHANNEL and not s.has_minimum) for s in kv.streams):
        return "scales are per token or, of u4 and u2 alone, per channel"
    if any(not s.dtype.is_float and not s.is_quantized or s.dtype is DType.U8 for s in kv.streams):
        return "streams are of float types or of i8, f8e4m3, u4 and u2"
    return ""
