"""Graphs as text. `parse(print_graph(g)) == g`."""

from __future__ import annotations

import json
import re
from typing import Any, cast

from ir.dims import Bounds
from ir.graph import Arg, Graph, Op, Scalar, Value
from ir.text.expressions import expression
from ir.types import KV, TOKEN, Stream, Tensor, Type

PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.]*")
LOC_COLUMN = 100


def print_graph(graph: Graph) -> str:
    """The whole graph, one op a line, with a newline at the end."""
    header = f"graph @{_name(graph.name)}({', '.join(_declare(v) for v in graph.inputs)})"
    if graph.dims:
        header += f" dims {{{', '.join(f'{n}: {_bounds(b)}' for n, b in graph.dims.items())}}}"
    if graph.arena:
        header += f" arena [{', '.join(expression(size) for size in graph.arena)}]"
    lines = [header + " {", *(f"  {print_op(op)}" for op in graph.ops)]
    lines.append(f"  return {', '.join(_value(v) for v in graph.outputs)}" if graph.outputs else "  return")
    return "\n".join([*lines, "}"]) + "\n"


def print_op(op: Op) -> str:
    """One op: results = kind operands {attributes} : types  // loc."""
    text = f"{', '.join(_value(v) for v in op.outs)} = {op.kind}"
    if op.args:
        text += " " + ", ".join(print_arg(a) for a in op.args)
    if op.attrs:
        text += f" {{{', '.join(f'{k}={print_attr(v)}' for k, v in op.attrs.items())}}}"
    text += " : " + ", ".join(print_type(v.type) for v in op.outs)
    return f"{text.ljust(LOC_COLUMN)} // {json.dumps(op.loc)[1:-1]}" if op.loc else text


def print_arg(arg: Arg) -> str:
    if arg is None:
        return "_"
    if isinstance(arg, Scalar):
        return print_attr(arg.value)
    return _value(arg) if isinstance(arg, Value) else f"@{_name(arg.name)}: {print_type(arg.type)}"


def print_type(type: Type) -> str:
    if isinstance(type, Tensor):
        return f"{type.dtype}[{','.join(expression(d) for d in type.shape)}]"
    return _print_kv(type)


def _print_kv(kv: KV) -> str:
    lifetime = "full" if kv.window is None else f"window {kv.window}"
    lifetime = "tail" if kv.tail else "state" if kv.state else lifetime
    streams = ", ".join(f"{s.name} {_format(s)}[{s.heads},{s.head_size}]" for s in kv.streams)
    return f"kv[{lifetime}: {streams}; block {kv.block}; layers {kv.layers}]"


def _format(stream: Stream) -> str:
    if stream.per_block:
        return f"{stream.dtype} per block"
    return str(stream.dtype) if stream.per == TOKEN else f"{stream.dtype} per {stream.per}"


def print_attr(value: Any) -> str:
    """A literal, quoted string, list, element type or expression."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, str):
        return json.dumps(str(value))
    if isinstance(value, tuple | list):
        return f"[{', '.join(print_attr(v) for v in cast('tuple[Any, ...]', value))}]"
    return expression(value)


def _declare(value: Value) -> str:
    return f"{_value(value)}: {print_type(value.type)}"


def _value(value: Value) -> str:
    return f"%{_name(value.name)}"


def _name(name: str) -> str:
    return name if PLAIN_NAME.fullmatch(name) else json.dumps(name)


def _bounds(bounds: Bounds) -> str:
    low, high = bounds
    return f"{low}..{'' if high is None else high}"
