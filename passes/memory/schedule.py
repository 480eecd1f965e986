"""What runs and where its data lies: a lowered graph's kernels, and whose memory each value is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ir.graph import Graph, Op
from passes.memory.places import Place, is_view, places


@dataclass(frozen=True)
class Kernel:
    """Ops that run as one: a pointwise group, or a single op.

    inside: values that nothing outside the group reads; they never reach memory.
    """

    ops: tuple[Op, ...]
    inside: frozenset[str]


@dataclass(frozen=True)
class Schedule:
    """An analysis of one graph.

    constants: values that are packed with the weights.
    given: values whose memory is the caller's: the inputs and, if a kernel can write them there, the logits.
    logits: the value written straight to the caller's logits, or None.
    """

    graph: Graph
    places: Mapping[str, Place]
    constants: frozenset[str]
    kernels: tuple[Kernel, ...]
    given: frozenset[str]
    logits: str | None

    @staticmethod
    def of(graph: Graph) -> Schedule:
        constants, found = graph.constants(), places(graph)
        groups = _groups(graph, constants, found)
        readers = _readers(graph)
        kernels = tuple(Kernel(tuple(ops), _inside(ops, readers)) for ops in groups)
        logits = _logits(graph, found)
        given = {v.name for v in graph.inputs}
        if logits is not None:
            given.add(logits)
        return Schedule(graph, found, constants, kernels, frozenset(given), logits)

    def root(self, name: str) -> str | None:
        """The value in whose memory a value lies; None for constants and KV state."""
        place = self.places.get(name)
        return None if place is None else place.root


def _groups(graph: Graph, constants: frozenset[str], found: Mapping[str, Place]) -> list[list[Op]]:
    """Groups as one, views and constants left out."""
    made: list[list[Op]] = []
    for op in graph.ops:
        if all(o.name in constants for o in op.outs) or is_view(op, found):
            continue
        group = op.attr("group")
        if made and group is not None and made[-1][-1].attr("group") == group:
            made[-1].append(op)
        else:
            made.append([op])
    return made


def _readers(graph: Graph) -> dict[str, set[int]]:
    """Identities of the ops that read each value; 0 for the caller."""
    found: dict[str, set[int]] = {v.name: {0} for v in graph.outputs}
    for op in graph.ops:
        for value in op.values:
            found.setdefault(value.name, set()).add(id(op))
    return found


def _inside(ops: list[Op], readers: Mapping[str, set[int]]) -> frozenset[str]:
    if len(ops) == 1:
        return frozenset()
    mine = {id(op) for op in ops}
    return frozenset(o.name for op in ops for o in op.outs if readers.get(o.name, set()) <= mine)


def _logits(graph: Graph, found: Mapping[str, Place]) -> str | None:
    name = graph.outputs[0].name
    owns = name in found and found[name].root == name
    return name if owns and all(v.name != name for v in graph.inputs) else None
