"""Output names: a pass that replaces an output by an equal value gives that value the output's name."""

from __future__ import annotations

from dataclasses import replace

from ir.graph import Arg, Graph, Op, Value


def keep_output_names(before: Graph, after: Graph) -> Graph:
    """The graph with its outputs called what they were called before, except outputs that are inputs."""
    inputs, taken = {v.name for v in after.inputs}, {o.name for op in after.ops for o in op.outs}
    renames: dict[str, Value] = {}
    for old, new in zip(before.outputs, after.outputs, strict=True):
        if old.name != new.name and not {old.name, new.name} & inputs and old.name not in taken:
            renames.setdefault(new.name, Value(old.name, new.type))
    if not renames:
        return after
    ops = tuple(_renamed(op, renames) for op in after.ops)
    return replace(after, ops=ops, outputs=tuple(renames.get(v.name, v) for v in after.outputs))


def _renamed(op: Op, renames: dict[str, Value]) -> Op:
    def use(arg: Arg) -> Arg:
        return renames.get(arg.name, arg) if isinstance(arg, Value) else arg

    return replace(op, args=tuple(map(use, op.args)), outs=tuple(renames.get(o.name, o) for o in op.outs))
