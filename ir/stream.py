"""Running a graph op by op: what is asked for is computed, and what is read no more is dropped.

So a run over all of a model's layers holds the values of one or two of them, whatever their number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ir.graph import Graph, Op, Value
from ir.interpret import Array, Compute, Machine, WeightReader, bind_dims, reference
from ir.ops import RefCall
from ir.types import KV

STATEFUL = ("kv_write", "kv_seal", "paged_recurrence")


def stream(
    graph: Graph,
    inputs: Mapping[str, Any],
    weights: WeightReader | Mapping[str, Array],
    wanted: Iterable[str],
    compute: Compute | None = None,
    visited: Iterable[str] = (),
) -> dict[str, Any]:
    """The wanted values by name, in f32. Raises InterpretError.

    inputs, weights: as for ir.interpret.interpret, but KV states are written in place. compute: gives the
    results of each op that those values depend on, in order; it may change or note them. visited: values that
    are computed too, and not kept.
    """
    wanted = set(wanted)
    ops = needed(graph, (*wanted, *visited))
    last = {value.name: index for index, op in enumerate(ops) for value in op.values}
    read = weights if callable(weights) else weights.__getitem__
    machine = Machine(graph, bind_dims(graph, inputs), read, np.float32, None, compute or in_place)
    for value in graph.inputs:
        machine.give(value, inputs[value.name])
    with np.errstate(all="ignore"):
        for index, op in enumerate(ops):
            machine.run(op)
            for value in (*op.values, *op.outs):
                if last.get(value.name, -1) <= index and value.name not in wanted:
                    machine.values.pop(value.name, None)
    return {name: machine.values[name] for name in wanted}


def needed(graph: Graph, values: Iterable[str]) -> list[Op]:
    """The ops that the values depend on, in order."""
    names, found = set(values), list[Op]()
    for op in reversed(graph.ops):
        if any(out.name in names for out in op.outs):
            names.update(value.name for value in op.values)
            found.append(op)
    return found[::-1]


def in_place(op: Op, call: RefCall) -> Sequence[Any]:
    """As the reference, but an op that writes a KV state copies one layer of it instead of all."""
    if op.kind not in STATEFUL:
        return reference(op, call)
    layer, state = call.attrs["layer"], call.args[0]
    states = [isinstance(a, Value) and isinstance(a.type, KV) for a in op.args]
    args = tuple(_layer(a, layer) if s else a for a, s in zip(call.args, states, strict=True))
    own = replace(call, args=args, attrs={**call.attrs, "layer": 0})
    *results, written = reference(op, own)
    for name, array in written.items():
        state[name][layer] = array[0]
    return (*results, state)


def _layer(state: Mapping[str, Array], layer: int) -> dict[str, Array]:
    return {name: array[layer : layer + 1] for name, array in state.items()}
