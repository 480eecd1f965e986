"""A stage's graph as a networkx graph, and written as DOT or GraphML for other tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import networkx
import sympy

from compiler.errors import CompileError
from compiler.inspect.sections import layer_paths, spelled
from ir.dims import normalize, product
from ir.graph import Graph, Op, Scalar, Value, Weight
from ir.text import print_attr, print_type
from ir.text.expressions import expression
from ir.types import Tensor, Type

CONTROL = re.compile(
    "[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"
)  # what XML 1.0 has no place for


def network(graph: Graph) -> networkx.MultiDiGraph:
    """A node per op, input and output; an edge per operand that is a value.

    Nodes are called `%` and the (first) value that they make; outputs `return N`. They have kind, shape,
    dtype, bytes (of all results, in the step's sizes), loc, layer, attrs, weights and literals. Edges have
    the value and its type.
    """
    found = networkx.MultiDiGraph(name=graph.name)
    maker: dict[str, str] = {}
    for value in graph.inputs:
        maker[value.name] = f"%{spelled(value.name)}"
        found.add_node(maker[value.name], kind="input", **_made([value]), **_place("", ""))
    paths = layer_paths(op.loc for op in graph.ops)
    for op in graph.ops:
        node = f"%{spelled(op.outs[0].name)}"
        maker |= {out.name: node for out in op.outs}
        found.add_node(node, kind=op.kind, **_made(op.outs), **_place(op.loc, paths[op.loc]), **_read(op))
        for value in op.values:
            found.add_edge(maker[value.name], node, **_edge(value))
    for number, value in enumerate(graph.outputs):
        found.add_node(f"return {number}", kind="output", **_made([value]), **_place("", ""))
        found.add_edge(maker[value.name], f"return {number}", **_edge(value))
    return found


def _made(values: Iterable[Value]) -> dict[str, str]:
    """Of several results one after the other, by `;`."""
    types = [value.type for value in values]
    return {
        "shape": "; ".join(_shape(t) for t in types),
        "dtype": "; ".join(str(t.dtype) if isinstance(t, Tensor) else "kv" for t in types),
        "bytes": expression(normalize(sum((_bytes(t) for t in types), sympy.Integer(0)))),
    }


def _shape(type_: Type) -> str:
    return (
        f"[{','.join(expression(d) for d in type_.shape)}]"
        if isinstance(type_, Tensor)
        else print_type(type_)
    )


def _bytes(type_: Type) -> Any:
    """A KV state is none of the step's: it is passed on."""
    if not isinstance(type_, Tensor):
        return sympy.Integer(0)
    return sympy.Integer(type_.dtype.size_bytes) * product(type_.shape)


def _place(loc: str, layer: str) -> dict[str, str]:
    return {"loc": loc, "layer": layer}


def _read(op: Op) -> dict[str, str]:
    weights = [f"@{spelled(a.name)}: {print_type(a.type)}" for a in op.args if isinstance(a, Weight)]
    return {
        "attrs": ", ".join(f"{name}={print_attr(value)}" for name, value in op.attrs.items()),
        "weights": ", ".join(weights),
        "literals": ", ".join(print_attr(a.value) for a in op.args if isinstance(a, Scalar)),
    }


def _edge(value: Value) -> dict[str, str]:
    return {"value": f"%{spelled(value.name)}", "type": print_type(value.type)}


def graphml(found: networkx.MultiDiGraph) -> str:
    clean = networkx.MultiDiGraph(name=_printable(str(found.graph["name"])))
    for node, data in found.nodes(data=True):
        clean.add_node(_printable(node), **_all_printable(data))
    for source, sink, data in found.edges(data=True):
        clean.add_edge(_printable(source), _printable(sink), **_all_printable(data))
    return "\n".join(networkx.generate_graphml(clean)) + "\n"


def _all_printable(data: Mapping[str, str]) -> dict[str, str]:
    return {key: _printable(text) for key, text in data.items()}


def _printable(text: str) -> str:
    """With JSON's escapes for the characters that XML cannot hold."""
    return CONTROL.sub(lambda found: json.dumps(found.group())[1:-1], text)


def dot(found: networkx.MultiDiGraph) -> str:
    """For graphviz: a cluster per layer."""
    return "\n".join(_dot_lines(found)) + "\n"


def _dot_lines(found: networkx.MultiDiGraph) -> Iterator[str]:
    yield f"digraph {_quoted(str(found.graph['name']))} {{"
    yield '  node [shape=box, fontname="Helvetica", fontsize=10]; edge [color="#777777"];'
    layers: dict[str, list[str]] = {}
    for node, data in found.nodes(data=True):
        layers.setdefault(data["layer"], []).append(node)
    for number, (layer, nodes) in enumerate(layers.items()):
        made = [f"{_quoted(node)} [{_node_attributes(node, found.nodes[node])}];" for node in nodes]
        if not layer:
            yield from (f"  {line}" for line in made)
            continue
        yield f'  subgraph "cluster_{number}" {{ label={_quoted(layer)}; color="#aaaaaa";'
        yield from (f"    {line}" for line in made)
        yield "  }"
    for source, sink, data in found.edges(data=True):
        about = f"value={_quoted(data['value'])}, type={_quoted(data['type'])}"
        about += f", tooltip={_quoted(data['value'] + ': ' + data['type'])}"
        yield f"  {_quoted(source)} -> {_quoted(sink)} [{about}];"
    yield "}"


def _node_attributes(node: str, data: Mapping[str, str]) -> str:
    """graphviz has a shape and a layer of its own."""
    label = f"{data['kind']}\n{node}\n{data['dtype']}{data['shape']}"
    style = ', style="rounded,filled", fillcolor="#eeeeee"' if data["kind"] in ("input", "output") else ""
    told = {"dims" if key == "shape" else key: text for key, text in data.items() if key != "layer"}
    rest = ", ".join(f"{key}={_quoted(text)}" for key, text in told.items() if text)
    return f"label={_quoted(label)}, tooltip={_quoted(data['loc'] or data['kind'])}{style}, {rest}"


def _quoted(text: str) -> str:
    """A string of DOT: line ends as its escape, backslashes kept from being one."""
    text = "".join(json.dumps(c)[1:-1] if c < " " and c != "\n" or c == "\x7f" else c for c in text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'


FORMATS: Mapping[str, Callable[[networkx.MultiDiGraph], str]] = {".dot": dot, ".graphml": graphml}


def writer(path: Path) -> Callable[[networkx.MultiDiGraph], str]:
    """Of the format that a file's name ends in. Raises CompileError where that is none that is known."""
    if path.suffix not in FORMATS:
        ends = " or ".join(FORMATS)
        raise CompileError(f"the file's name ends in {path.suffix or 'nothing'!r}", where=str(path),
                           todo=f"Name it with {ends}")  # fmt: skip
    return FORMATS[path.suffix]
