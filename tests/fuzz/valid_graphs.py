"""Valid graphs that no importer makes: ops of every kind put among a graph's own, and operands exchanged."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from ir.build import infer
from ir.graph import Arg, Graph, Op, Scalar, Value, Weight
from ir.ops import OPS, InferError
from ir.types import KV, Tensor

AXES = ((0,), (1,), (2,), (-1,), (0, 1))
ATTRS: dict[str, tuple[Any, ...]] = {
    "axis": (0, 1, 2, -1),
    "axes": AXES,
    "perm": ((1, 0), (0, 2, 1, 3), (1, 0, 2)),
    "sizes": ((1, 3), (4, 4), (2, 2), (8, 8)),
    "dtype": ("f32", "bf16", "i32", "bool", "f16"),
    "layer": (0, 1),
    "scale": (0.5, 1.0),
    "eps": (1e-5,),
    "start": (0, 1),
    "stop": (1, 2, 4),
    "step": (1, 2),
    "value": (0, 1, 2.5, True, -1e30),
    "activation": ("silu", "gelu", "none"),
    "gated": (True, False),
    "keepdims": (True, False),
    "rank": (1, 2, 3, 4),
    "mask": (True,),
}
NUMBERS = (Scalar(2.0), Scalar(0), Scalar(1), Scalar(-1e30), Scalar(True), Scalar(0.0))


def grown(rng: Random, graph: Graph) -> Graph:
    """The graph with ops added and operands exchanged for others of their type."""
    ops = list(graph.ops)
    for count in range(rng.choice((1, 2, 4, 8, 16))):
        at = rng.randrange(len(ops) + 1)
        if rng.random() < 0.7:
            ops[at:at] = _made(rng, f"new{count}", _before(graph, ops[:at]))
        elif at < len(ops):
            ops[at] = _exchanged(rng, ops[at], _before(graph, ops[:at]))
    values = [v for v in _before(graph, ops) if isinstance(v, Value) and isinstance(v.type, Tensor)]
    more = tuple(rng.choice(values) for _ in range(rng.choice((0, 0, 1, 3))))
    return replace(graph, ops=tuple(ops), outputs=(*graph.outputs, *more))


def _before(graph: Graph, ops: list[Op]) -> list[Arg]:
    """What an op after these may take."""
    weights = [a for op in ops for a in op.args if isinstance(a, Weight)]
    return [*graph.inputs, *weights, *(out for op in ops for out in op.outs)]


def _made(rng: Random, name: str, values: list[Arg]) -> list[Op]:
    """An op of these operands; none where few tries find none that is valid."""
    for _ in range(30):
        kind = rng.choice(list(OPS))
        op = OPS[kind]
        count = rng.randint(op.num_required, len(op.operands) + 2 * bool(op.variadic))
        args = [rng.choice(values) for _ in range(count)]
        if args and rng.random() < 0.5:  # equal types fit more often
            args = [args[0]] * count
        args = [rng.choice(NUMBERS) if rng.random() < 0.15 else a for a in args]
        attrs = {n: _attribute(rng, n, args) for n, given in op.attrs.items() if _is_set(rng, given)}
        try:
            types = infer(kind, tuple(args), attrs, "")
        except InferError:
            continue
        outs = tuple(Value(f"{name}.{i}", each) for i, each in enumerate(types))
        return [Op(kind, tuple(args), attrs, outs, rng.choice(("", "model.layers.0", "x\x1b[31m\ny")))]
    return []


def _is_set(rng: Random, default: Any) -> bool:
    return repr(default) == "required" or rng.random() < 0.3


def _attribute(rng: Random, name: str, args: list[Arg]) -> Any:
    shape = next((a.type.shape for a in args if _is_tensor(a)), (1,))  # type: ignore[union-attr]
    if name == "shape":
        return rng.choice((shape, shape[::-1], (1, *shape), (*shape, 1), (2, *shape)))
    if name == "size":
        return rng.choice((4, *shape))
    return rng.choice(ATTRS.get(name, (0, 1, 2, 0.5, "none")))


def _is_tensor(arg: Arg) -> bool:
    return isinstance(arg, Value | Weight) and isinstance(arg.type, Tensor)


def _exchanged(rng: Random, op: Op, values: list[Arg]) -> Op:
    """With one operand exchanged for a value of its type."""
    places = [i for i, a in enumerate(op.args) if isinstance(a, Value | Weight)]
    if not places or any(isinstance(out.type, KV) for out in op.outs):
        return op
    at = rng.choice(places)
    wanted = op.args[at].type  # type: ignore[union-attr]
    same = [v for v in values if isinstance(v, Value | Weight) and v.type == wanted]
    args = (*op.args[:at], rng.choice(same), *op.args[at + 1 :]) if same else op.args
    return replace(op, args=args)
