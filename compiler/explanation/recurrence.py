"""A recurrence, before or after paging, in words."""

from __future__ import annotations

from typing import Any

from compiler.explanation.facts import Recurrence
from ir.graph import Op, tensor_of
from passes.match import operand

RECURRENCES = ("recurrence", "paged_recurrence")


def recurrence_of(op: Op, groups: dict[str, int]) -> Recurrence:
    """groups: the group of each KV state, by a value's name."""
    paged = op.kind == "paged_recurrence"
    first, heads = (1, 1) if paged else (0, 1)  # the first tensor; the axis of heads
    key, value, decay = (tensor_of(op.args[first + i]).shape for i in (1, 2, 3))
    beta, rates = (operand(op, i) for i in ((8, 9) if paged else (4, 5)))
    counts: Any = (value[heads], key[heads])
    sizes: Any = (key[-1], value[-1])
    kind = "element" if rates is not None else "head" if decay[-1] == 1 else "channel of the keys"
    group = groups.get(getattr(op.args[0], "name", "")) if paged else None
    return Recurrence(counts[0], counts[1], sizes, kind, beta is not None, group)
