"""Lay values out in as few and as small buffers as their lifetimes allow, with sizes symbolic in T, R and Q.

Each op's `at` holds the buffer of each result (-1: none: a constant, KV state, the logits, or a value that
stays inside a pointwise group), then that of its scratch space if it needs one. `Graph.arena` holds the
buffers' bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ir.dims import Dim
from ir.graph import Graph, Op
from ir.types import Tensor
from passes.base import Pass, Result
from passes.memory.replay import check_plan
from passes.memory.schedule import Schedule
from passes.memory.sizes import Form, bytes_of, form_bytes, linear_form, scratch_bytes, scratch_name


@dataclass(frozen=True)
class Life:
    """A piece of memory: the kernels that need it, first to last, and its bytes."""

    name: str
    first: int
    last: int
    bytes: Dim


@dataclass(frozen=True)
class PlanMemory(Pass):
    """device: the kind that kernels' scratch space is for, "cpu" or "gpu"."""

    device: str = "cpu"

    def run(self, graph: Graph) -> Result:
        schedule = Schedule.of(graph)
        buffer_of, sizes = _assign(lifetimes(schedule, self.device))
        ops = tuple(_annotate(op, schedule, buffer_of) for op in graph.ops)
        planned = replace(graph, ops=ops, arena=sizes)
        check_plan(planned, self.device)
        return Result(planned, len(sizes))


def lifetimes(schedule: Schedule, device: str = "cpu") -> list[Life]:
    """Every value and scratch space that needs a buffer, in order of birth."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    types: dict[str, Tensor] = {}
    scratch: list[Life] = []
    for index, kernel in enumerate(schedule.kernels):
        for op in kernel.ops:
            for value in (*op.values, *op.outs):
                root = schedule.root(value.name)
                if root is not None and value.name not in kernel.inside:
                    first.setdefault(root, index)
                    last[root] = index
            types |= {o.name: o.type for o in op.outs if isinstance(o.type, Tensor)}
            if (need := scratch_bytes(op, device)) != 0:
                scratch.append(Life(scratch_name(op), index, index, need))
    for value in schedule.graph.outputs:
        if (root := schedule.root(value.name)) is not None:
            last[root] = len(schedule.kernels)
    owned = [Life(n, first[n], last[n], bytes_of(types[n])) for n in first if n not in schedule.given]
    return sorted((*owned, *scratch), key=lambda life: life.first)


def _assign(lives: list[Life]) -> tuple[dict[str, int], tuple[Dim, ...]]:
    """Each piece of memory takes the free buffer that has to grow least, or a new one."""
    buffer_of: dict[str, int] = {}
    forms: list[Form] = []
    busy_until: list[int] = []
    for life in lives:
        need = linear_form(life.bytes)
        free = [b for b, last in enumerate(busy_until) if last < life.first]
        best = min(free, key=lambda b: _growth(forms[b], need), default=None)
        if best is None or _growth(forms[best], need) >= _weight(need):
            best = len(forms)
            forms.append(need)
            busy_until.append(life.last)
        else:
            forms[best] = {k: max(forms[best][k], need[k]) for k in need}
            busy_until[best] = life.last
        buffer_of[life.name] = best
    return buffer_of, tuple(form_bytes(f) for f in forms)


def _weight(form: Form) -> int:
    """Bytes in a full step of the runtime's defaults: 512 tokens of 64 requests."""
    return form[""] + 512 * form["T"] + 64 * (form["R"] + form["Q"])


def _growth(have: Form, need: Form) -> int:
    return _weight({k: max(0, need[k] - have[k]) for k in need})


def _annotate(op: Op, schedule: Schedule, buffer_of: Mapping[str, int]) -> Op:
    at = [buffer_of.get(schedule.root(o.name) or "", -1) for o in op.outs]
    if scratch_name(op) in buffer_of:
        at.append(buffer_of[scratch_name(op)])
    return op.with_attrs(at=tuple(at))
