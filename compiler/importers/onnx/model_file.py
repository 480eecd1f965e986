"""An ONNX file as nodes in order: parsed within bounds, with one version of each op set."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.files import is_file
from compiler.importers.onnx.tensors import AGAIN
from compiler.importers.refused import ImportRefused, one_line
from runtime.errors import shown

MAX_BYTES = 2**31  # of a protobuf message
MAX_NODES = 1 << 20
OLDEST, NEWEST = 11, 26  # versions of the default op set


@dataclass(frozen=True)
class Model:
    """proto: the ModelProto. opsets: version by domain. functions: by (domain, name)."""

    path: Path
    proto: Any
    opsets: Mapping[str, int]
    functions: Mapping[tuple[str, str], Any]

    @property
    def graph(self) -> Any:
        return self.proto.graph


def read_model(path: Path) -> Model:
    """Raises ImportRefused on what is no ONNX model that can be read."""
    import onnx

    if not is_file(path):
        raise ImportRefused("it is no file", where=str(path), todo=AGAIN)
    if path.stat().st_size >= MAX_BYTES:
        what = f"{path.stat().st_size:,} bytes; an ONNX file has less than {MAX_BYTES:,}"
        raise ImportRefused(what, where=str(path), todo="Export it with external data")
    try:
        proto = onnx.ModelProto.FromString(path.read_bytes())
    except Exception as error:  # protobuf's own DecodeError, which is not public
        raise ImportRefused(f"not an ONNX model: {one_line(error)}", where=str(path), todo=AGAIN) from None
    if not _is_text(proto):
        raise ImportRefused("not an ONNX model: a text in it is not UTF-8", where=str(path), todo=AGAIN)
    if not proto.HasField("graph") or not proto.graph.output:
        raise ImportRefused("not an ONNX model: it has no graph", where=str(path), todo=AGAIN)
    functions = {(domain_of(f), f.name): f for f in proto.functions}
    return Model(path, proto, _opsets(proto.opset_import, str(path)), functions)


def _is_text(message: Any) -> bool:
    """Whether all texts in a message are UTF-8: protobuf hands out others as bytes."""
    for field, value in message.ListFields():
        if field.type == field.TYPE_STRING and any(isinstance(v, bytes) for v in _each(field, value)):
            return False
        if field.type == field.TYPE_MESSAGE and not all(map(_is_text, _each(field, value))):
            return False
    return True


def _each(field: Any, value: Any) -> Iterable[Any]:
    return value if field.is_repeated else (value,)


def _opsets(imports: Any, where: str) -> dict[str, int]:
    found = {domain_of(each): int(each.version) for each in imports}
    version = found.get("", 0)
    if not OLDEST <= version <= NEWEST:
        what = f"its op set is {version or 'not given'}; {OLDEST} to {NEWEST} are read"
        raise ImportRefused(what, where=where, todo="Export the model with one of those")
    return found


def domain_of(each: Any) -> str:
    """ "" for the default domain, which has two names."""
    return "" if each.domain == "ai.onnx" else each.domain


def in_order(nodes: Iterable[Any], known: Iterable[str], where: str) -> list[Any]:
    """Nodes after those whose results they read. Raises ImportRefused on a cycle, on a name that nothing
    makes, and on one that is made twice."""
    nodes = list(nodes)
    if len(nodes) > MAX_NODES:
        raise ImportRefused(f"{len(nodes)} nodes; at most {MAX_NODES} are read", where=where, todo=AGAIN)
    makers: dict[str, int] = {}
    defined = set(known)
    for number, node in enumerate(nodes):
        for out in filter(None, node.output):
            if out in makers or out in defined:
                raise ImportRefused(f"{shown(out)} is made twice", where=where, todo=AGAIN)
            makers[out] = number
    return _sorted(nodes, makers, defined, where)


def _sorted(nodes: list[Any], makers: Mapping[str, int], defined: set[str], where: str) -> list[Any]:
    before = [{makers[n] for n in _reads(node) if n in makers} for node in nodes]
    for node in nodes:
        missing = next((n for n in _reads(node) if n not in makers and n not in defined), None)
        if missing is not None:
            what = f"{node.op_type} reads {shown(missing)}, which nothing makes"
            raise ImportRefused(what, where=where, todo=AGAIN)
    if all(need < number for number, needs in enumerate(before) for need in needs):
        return nodes
    after: dict[int, list[int]] = {}
    for number, needs in enumerate(before):
        for need in needs:
            after.setdefault(need, []).append(number)
    waiting = [len(needs) for needs in before]
    ready, done = deque(n for n, count in enumerate(waiting) if not count), list[int]()
    while ready:
        done.append(ready.popleft())
        for user in after.get(done[-1], ()):
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)
    if len(done) < len(nodes):
        stuck = next(node for number, node in enumerate(nodes) if waiting[number])
        what = f"its nodes form a cycle: {stuck.op_type} reads what is computed from its own result"
        raise ImportRefused(what, where=f"{where}, node {shown(stuck.name)}", todo=AGAIN)
    return [nodes[n] for n in done]


def _reads(node: Any) -> Iterable[str]:
    """Names that a node reads, those of its branches left out: they see all that is around them."""
    return filter(None, node.input)
