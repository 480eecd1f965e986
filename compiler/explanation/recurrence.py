"""A recurrence, before or after paging, in words."""

from __future__ import annotations

from typing import Any

from compiler.explanation.facts import Recurrence
from ir.graph import Op
from passes.match import operand_named, shape

RECURRENCES = ("recurrence", "paged_recurrence")


def recurrence_of(op: Op, groups: dict[str, int]) -> Recurrence:
    """groups: the group of each KV state, by a value's name."""
    key, value, decay = (shape(operand_named(op, name)) for name in ("k", "v", "decay"))
    beta, rates = (operand_named(op, name) for name in ("beta", "rates"))
    counts: Any = (value[1], key[1])
    sizes: Any = (key[-1], value[-1])
    kind = "element" if rates is not None else "head" if decay[-1] == 1 else "channel of the keys"
    group = groups.get(getattr(op.args[0], "name", ""))
    return Recurrence(counts[0], counts[1], sizes, kind, beta is not None, group)
