"""An ONNX graph -> the IR, node by node: functions are inlined, branches on constants are taken."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compiler.importers.onnx.context import Context, Held, Known, Shared
from compiler.importers.onnx.formula import FormulaError
from compiler.importers.onnx.inputs import LENGTH
from compiler.importers.onnx.model_file import Model, domain_of, in_order
from compiler.importers.onnx.table import CONVERTERS
from compiler.importers.onnx.tensors import stored_tensor
from compiler.importers.refused import OTHER_OPS, ImportRefused
from ir.graph import Value
from ir.ops import InferError
from ir.types import DType
from runtime.errors import shown

MAX_DEPTH = 16  # of functions in functions, and of branches
MAX_VISITED = 1 << 16  # nodes, those of functions once for each call
# Operands and attributes of another kind, rank or size than the op takes.
REFUSED = (
    *(ImportRefused, InferError, FormulaError, TypeError, ValueError, KeyError, IndexError),
    *(AttributeError, ArithmeticError),
)
Env = dict[str, Held]


@dataclass(frozen=True)
class Frame:
    """Where nodes stand: in the graph, or in a function or a branch that is called there.

    env: what each name became. opsets: versions by domain. given: attributes of the function's call. around:
    the module that it was called in.
    """

    env: Env
    opsets: Mapping[str, int]
    given: Mapping[str, Any] = field(default_factory=dict[str, Any])
    depth: int = 0
    around: str = ""


class Walk:
    """Converts nodes, one after the other, into one graph of the IR."""

    def __init__(self, model: Model, shared: Shared, array: Callable[[Any], Any]) -> None:
        """array: reads a checked tensor."""
        self.model, self.shared, self.array, self.visited = model, shared, array, 0
        self.ordered: dict[tuple[str, str], list[Any]] = {}  # nodes of functions

    def run(self, nodes: Sequence[Any], env: Env) -> None:
        self._nodes(nodes, Frame(env, dict(self.model.opsets)))

    def _nodes(self, nodes: Sequence[Any], frame: Frame) -> None:
        for node in nodes:
            self._node(node, frame)

    def _node(self, node: Any, frame: Frame) -> None:
        loc = module_of(node) or frame.around
        kind = ".".join(filter(None, (domain_of(node), node.op_type)))
        self.visited += 1
        try:
            if self.visited > MAX_VISITED:
                raise ImportRefused(f"its functions are more than {MAX_VISITED} nodes where they are called")
            if frame.depth > MAX_DEPTH:
                raise ImportRefused(f"functions and branches are more than {MAX_DEPTH} deep")
            results = self._results(node, kind, replace(frame, around=loc))
        except REFUSED as error:
            if isinstance(error, ImportRefused) and error.op:
                raise
            what = getattr(error, "what", "") or f"{type(error).__name__}: {error}"[:300]
            place = f"{kind} in {loc or shown(node.name) or 'the model'}"
            refused = ImportRefused(what, where=place, todo=getattr(error, "todo", "") or OTHER_OPS)
            raise refused.at(kind, loc, "") from error
        for name, result in zip(node.output, results, strict=False):
            if name and result is not None:
                frame.env[name] = result

    def _results(self, node: Any, kind: str, frame: Frame) -> Sequence[Any]:
        """frame: around the node, with its own module."""
        attrs = {a.name: self._attribute(a, frame.given) for a in node.attribute}
        args = [frame.env[name] if name else None for name in node.input]
        function = self.model.functions.get((domain_of(node), node.op_type))
        if function is not None:
            return self._call(function, args, attrs, frame)
        if kind == "If":
            return self._branch(args[0], attrs, frame)
        if kind not in CONVERTERS:
            raise ImportRefused("this op has no converter")
        while args and args[-1] is None:
            args.pop()
        outputs = tuple(bool(name) for name in node.output)
        version = frame.opsets.get(domain_of(node), 0)
        context = Context(self.shared, node.op_type, frame.around, version, outputs)
        found = CONVERTERS[kind](context, *args, **{k: v for k, v in attrs.items() if v is not None})
        return found if isinstance(found, tuple) else (found,)

    def _call(
        self, function: Any, args: Sequence[Any], attrs: Mapping[str, Any], frame: Frame
    ) -> Sequence[Any]:
        """A function of the model, its nodes in place of the call."""
        defaults = {a.name: self._attribute(a, {}) for a in function.attribute_proto}
        padded = [*args, *[None] * (len(function.input) - len(args))]
        env: Env = {n: v for n, v in zip(function.input, padded, strict=True) if v is not None}
        opsets = {domain_of(each): int(each.version) for each in function.opset_import}
        key = (domain_of(function), function.name)
        if key not in self.ordered:
            where = f"function {shown(function.name)}"
            self.ordered[key] = in_order(function.node, function.input, where)
        inner = Frame(_Optional(env), opsets, {**defaults, **attrs}, frame.depth + 1, frame.around)
        self._nodes(self.ordered[key], inner)
        return [env[name] for name in function.output]

    def _branch(self, condition: Any, attrs: Mapping[str, Any], frame: Frame) -> Sequence[Any]:
        context = Context(self.shared, "If", frame.around, 0)
        chosen = bool(np.asarray(context.known(condition, "condition")).reshape(-1)[0])
        branch, env = attrs["then_branch" if chosen else "else_branch"], dict(frame.env)
        for tensor in branch.initializer:
            env[tensor.name] = Known(self.small(tensor))
        self._nodes(in_order(branch.node, env, "a branch"), replace(frame, env=env, depth=frame.depth + 1))
        return [env[out.name] for out in branch.output]

    def _attribute(self, attribute: Any, given: Mapping[str, Any]) -> Any:
        """A Python value; a tensor is Known, a graph itself, None one that the function's call leaves out."""
        if attribute.ref_attr_name:
            return given.get(attribute.ref_attr_name)
        kind = attribute.type
        if kind == 4:  # of AttributeProto: a tensor; 3: a string; 6 and 7: lists
            return Known(self.small(attribute.t))
        if kind == 3:
            return attribute.s.decode("utf-8", "replace")
        if kind not in _FIELDS:
            raise ImportRefused(f"attribute {shown(attribute.name)} is of a kind that is not read")
        value = getattr(attribute, _FIELDS[kind])
        return list(value) if kind in (6, 7) else value

    def small(self, tensor: Any) -> Any:
        """The array of a constant: integers are int64, floats float32."""
        return plain(self.array(stored_tensor(tensor, self.model.path.parent, str(self.model.path))))


class _Optional(dict[str, Any]):
    """Names of a function: operands that its call leaves out are None."""

    def __init__(self, env: Env) -> None:
        super().__init__()
        self.env = env

    def __getitem__(self, name: str) -> Any:
        return self.env.get(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self.env[name] = value


_FIELDS = {1: "f", 2: "i", 5: "g", 6: "floats", 7: "ints"}  # of AttributeProto, by its kind


def plain(array: Any) -> Any:
    """Integers as int64 and floats as float32, as which they are computed with."""
    if np.issubdtype(array.dtype, np.integer):
        return array.astype(np.int64)
    return array if array.dtype == np.bool_ else array.astype(np.float32)


def module_of(node: Any) -> str:
    """The path of the module that a node came from: what the exporter noted, or the folders of its name."""
    for entry in node.metadata_props:
        if entry.key == "pkg.torch.onnx.name_scopes":
            scopes = [s for s in re.findall(r"'([^']*)'", entry.value)[:-1] if s]
            return printable(scopes[-1]) if scopes else ""
    folders = [part for part in node.name.split("/") if part]
    return printable(".".join(folders[:-1]))


def printable(text: str) -> str:
    """On one line, of letters that a graph's text and sources may hold."""
    return re.sub(r"[^A-Za-z0-9_.\-\[\]]", "_", text)[:200]


def logits_of(outputs: Sequence[Any], env: Env, shared: Shared) -> Value:
    """The result called logits, or else the first, [1,S,V]. Raises ImportRefused."""
    names = [out.name for out in outputs]
    name = "logits" if "logits" in names else names[0]
    found = env.get(name)
    context = Context(shared, "output", "", 0)
    if not isinstance(found, Value) or context.rank(found) != 3:
        what = f"the model must give logits [batch, sequence, vocabulary], not {shown(name)}"
        raise ImportRefused(what, where="output", todo="Export it with its language-model head")
    batch, length, _ = context.shape(found)
    if (batch, length) != (1, LENGTH):
        what = f"its logits are {list(context.shape(found))}, and not a row for each of one sequence's tokens"
        raise ImportRefused(what, where="output", todo="Export it with a batch and a length that may differ")
    return context.tensor(found, DType.F32)  # type: ignore[return-value]
