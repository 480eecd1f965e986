"""Lay values out in as few and as small buffers as their lifetimes allow, with sizes symbolic in T, R and Q.

Each op's `at` holds the buffer of each result (-1: none: a constant, KV state, the logits, or a value that
stays inside a pointwise group), then that of its scratch space if it needs one. `Graph.arena` holds the
buffers' bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import sympy

from ir.dims import Dim, free_names, normalize, product, symbol
from ir.graph import Graph, Op, Value, tensor_of
from ir.types import Tensor
from passes.base import Pass, Result
from passes.memory.schedule import Kernel, Schedule

SIZES = ("T", "R", "Q")
PARTIALS = 64  # (token, partition) pairs whose attention may be computed apart; attention.h counts on it
Form = Mapping[str, int]  # bytes as a linear form: a coefficient for each of SIZES, "" the constant


class PlanError(ValueError):
    """Two values that live at once share a buffer, or one does not fit in its own."""


@dataclass(frozen=True)
class Life:
    """A piece of memory: the kernels that need it, first to last, and its bytes."""

    name: str
    first: int
    last: int
    bytes: Dim


@dataclass(frozen=True)
class PlanMemory(Pass):
    def run(self, graph: Graph) -> Result:
        schedule = Schedule.of(graph)
        buffer_of, sizes = _assign(lifetimes(schedule))
        ops = tuple(_annotate(op, schedule, buffer_of) for op in graph.ops)
        planned = replace(graph, ops=ops, arena=sizes)
        check_plan(planned)
        return Result(planned, len(sizes))


def lifetimes(schedule: Schedule) -> list[Life]:
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
            if (need := scratch_bytes(op)) != 0:
                scratch.append(Life(scratch_name(op), index, index, need))
    for value in schedule.graph.outputs:
        if (root := schedule.root(value.name)) is not None:
            last[root] = len(schedule.kernels)
    owned = [Life(n, first[n], last[n], bytes_of(types[n])) for n in first if n not in schedule.given]
    return sorted((*owned, *scratch), key=lambda life: life.first)


def scratch_name(op: Op) -> str:
    return f"{op.outs[0].name}.scratch"


def scratch_bytes(op: Op) -> Dim:
    """Bytes of scratch space that an op's kernel needs."""
    if op.kind == "linear":
        return normalize(sympy.Integer(4) * product(tensor_of(op.args[0]).shape))
    if op.kind == "paged_attention":
        heads, size = tensor_of(op.out).shape[1:]
        return 4 * PARTIALS * int(heads) * (-(-int(size) // 16) * 16 + 2)
    return 0


def bytes_of(type_: Tensor) -> Dim:
    return normalize(sympy.Integer(type_.dtype.size_bytes) * product(type_.shape))


def linear_form(size: Dim) -> Form:
    """Bytes as coefficients of T, R and Q and a constant.

    They are for sizes rounded up to 16, so that every buffer's bytes are a multiple of 64. Raises PlanError
    if the size is not linear in them.
    """
    poly = sympy.Poly(cast(Any, size), *(symbol(s) for s in SIZES)) if free_names(size) else None
    form = {name: 0 for name in (*SIZES, "")}
    if poly is None:
        form[""] = int(cast(Any, size))
    else:
        for powers, coefficient in cast("Iterable[Any]", poly.terms()):
            if sum(powers) > 1 or free_names(coefficient):
                raise PlanError(f"{size} bytes are not a linear form of {', '.join(SIZES)}")
            form[SIZES[powers.index(1)] if any(powers) else ""] = int(coefficient)
    return {k: -(-v // (64 if k == "" else 4)) * (64 if k == "" else 4) for k, v in form.items()}


def form_bytes(form: Form) -> Dim:
    return normalize(sympy.Integer(form[""]) + sum(form[s] * symbol(s) for s in SIZES))


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


def check_plan(graph: Graph) -> None:
    """Replays the plan: what a kernel reads must still be what was written. Raises PlanError.

    Independent of the assignment: it keeps, for each buffer, the name of what it holds.
    """
    schedule = Schedule.of(graph)
    replay = _Replay(schedule, {o.name: op.attr("at")[i] for op in graph.ops for i, o in enumerate(op.outs)})
    for kernel in schedule.kernels:
        replay.run(kernel)
    for value in graph.outputs:
        replay.read(value)


@dataclass
class _Replay:
    schedule: Schedule
    buffer: Mapping[str, int]
    holds: dict[int, str] = field(default_factory=dict[int, str])

    def read(self, value: Value) -> int | None:
        """The buffer that a value is read from; None for memory that is not the arena's."""
        root = self.schedule.root(value.name)
        if root is None or root in self.schedule.given:
            return None
        if self.holds.get(self.buffer[root]) != root:
            found = self.holds.get(self.buffer[root])
            raise PlanError(f"%{value.name} is read from buffer {self.buffer[root]}, which holds %{found}")
        return self.buffer[root]

    def run(self, kernel: Kernel) -> None:
        made = {o.name for op in kernel.ops for o in op.outs}
        busy = {self.read(v) for op in kernel.ops for v in op.values if v.name not in made}
        for name, place, need in self._writes(kernel):
            if place in busy:
                raise PlanError(
                    f"%{name} is written to buffer {place}, where %{self.holds.get(place)} is in use"
                )
            if exceeds(need, self.schedule.graph.arena[place]):
                raise PlanError(f"%{name} of {need} bytes does not fit buffer {place}")
            busy.add(place)
            self.holds[place] = name

    def _writes(self, kernel: Kernel) -> Iterable[tuple[str, int, Dim]]:
        """(name, buffer, bytes) of what a kernel writes to the arena."""
        for op in kernel.ops:
            at = op.attr("at")
            for index, out in enumerate(op.outs):
                kept = out.name not in kernel.inside and out.name not in self.schedule.given
                if isinstance(out.type, Tensor) and kept and self.schedule.root(out.name) == out.name:
                    yield out.name, at[index], bytes_of(out.type)
            if (need := scratch_bytes(op)) != 0:
                yield scratch_name(op), at[-1], need


def exceeds(need: Dim, have: Dim) -> bool:
    a, b = linear_form(need), linear_form(have)
    return any(a[k] > b[k] for k in a)
