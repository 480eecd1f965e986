"""Lay values out in as few and as small buffers as their lifetimes allow, with sizes symbolic in T, R and Q.

Each op's `at` holds the buffer of each result (-1: none: a constant, KV state, the logits, or a value that
stays inside
a pointwise group), then that of its scratch space if it needs one. `Graph.arena` holds the buffers' bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import sympy

from ir.dims import Dim, free_names, normalize, product, symbol
from ir.graph import Graph, Op, Value
from ir.types import Tensor
from passes.base import Pass, Result
from passes.places import constants, is_view, places, tensor

SIZES = ("T", "R", "Q")
PARTIALS = 64  # (token, partition) pairs whose attention may be computed apart
Form = Mapping[str, int]  # bytes as a linear form: a coefficient for each of SIZES, "" the constant


class PlanError(ValueError):
    """Two values that live at once share a buffer, or one does not fit in its own."""


@dataclass(frozen=True)
class Kernel:
    """Ops that run as one: a pointwise group, or a single op."""

    ops: tuple[Op, ...]


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
        lives = lifetimes(graph)
        buffer_of, sizes = _assign(lives)
        ops = tuple(_annotate(op, graph, buffer_of) for op in graph.ops)
        planned = replace(graph, ops=ops, arena=sizes)
        check_plan(planned)
        return Result(planned, len(sizes))


def kernels(graph: Graph) -> tuple[Kernel, ...]:
    """What runs, in order: groups as one, views and constants left out."""
    fixed, found = constants(graph), places(graph)
    made: list[list[Op]] = []
    for op in graph.ops:
        if all(o.name in fixed for o in op.outs) or is_view(op, found):
            continue
        group = op.attr("group")
        if made and group is not None and made[-1][-1].attr("group") == group:
            made[-1].append(op)
        else:
            made.append([op])
    return tuple(Kernel(tuple(ops)) for ops in made)


def logits_root(graph: Graph) -> str | None:
    """The value that the kernels write straight to where the caller wants the logits."""
    out = graph.outputs[0]
    place = places(graph).get(out.name)
    return (
        out.name if place is not None and place.root == out.name and out.name in graph.producers() else None
    )


def external(graph: Graph) -> set[str]:
    """Names of values whose memory is the caller's."""
    found = {v.name for v in graph.inputs}
    logits = logits_root(graph)
    return found if logits is None else found | {logits}


def lifetimes(graph: Graph) -> list[Life]:
    """Every value and scratch space that needs a buffer, in order of birth."""
    order, found, given = kernels(graph), places(graph), external(graph)
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    types: dict[str, Tensor] = {}
    scratch: list[Life] = []
    for index, kernel in enumerate(order):
        inside = internal(graph, kernel)
        for op in kernel.ops:
            for value in (*op.values, *op.outs):
                if value.name in found and value.name not in inside:
                    root = found[value.name].root
                    first.setdefault(root, index)
                    last[root] = index
            types |= {o.name: o.type for o in op.outs if isinstance(o.type, Tensor)}
            if (need := scratch_bytes(op)) != 0:
                scratch.append(Life(scratch_name(op), index, index, need))
    for value in graph.outputs:
        if value.name in found:
            last[found[value.name].root] = len(order)
    owned = [Life(n, first[n], last[n], bytes_of(types[n])) for n in first if n not in given]
    return sorted((*owned, *scratch), key=lambda life: life.first)


def internal(graph: Graph, kernel: Kernel) -> set[str]:
    """Values of a group that nothing outside it reads: they never reach memory."""
    mine = {o.name for op in kernel.ops for o in op.outs}
    if len(kernel.ops) == 1:
        return set()
    kept = {v.name for v in graph.outputs}
    ids = {id(op) for op in kernel.ops}
    read = {v.name for op in graph.ops if id(op) not in ids for v in op.values}
    return mine - kept - read


def scratch_name(op: Op) -> str:
    return f"{op.outs[0].name}.scratch"


def scratch_bytes(op: Op) -> Dim:
    """Bytes of scratch space that an op's kernel needs."""
    if op.kind == "linear":
        return normalize(sympy.Integer(4) * product(tensor(cast(Value, op.args[0])).shape))
    if op.kind == "paged_attention":
        heads, size = tensor(op.out).shape[1:]
        return 4 * PARTIALS * int(heads) * (-(-int(size) // 16) * 16 + 2)
    return 0


def bytes_of(type_: Tensor) -> Dim:
    return normalize(sympy.Integer(type_.dtype.size_bytes) * product(type_.shape))


def linear_form(size: Dim) -> Form:
    """Bytes as coefficients of T, R and Q and a constant, each for sizes rounded up to 16, so that all are
    multiples of 64.

    Raises PlanError if the size is not linear in them.
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
    return form[""] + 512 * form["T"] + 64 * (form["R"] + form["Q"])  # a typical step


def _growth(have: Form, need: Form) -> int:
    return _weight({k: max(0, need[k] - have[k]) for k in need})


def _annotate(op: Op, graph: Graph, buffer_of: Mapping[str, int]) -> Op:
    found = _roots(graph)
    at = [buffer_of.get(found.get(o.name, ""), -1) for o in op.outs]
    if scratch_name(op) in buffer_of:
        at.append(buffer_of[scratch_name(op)])
    return op.with_attrs(at=tuple(at))


def _roots(graph: Graph) -> dict[str, str]:
    return {name: place.root for name, place in places(graph).items()}


def check_plan(graph: Graph) -> None:
    """Replays the plan kernel by kernel: what a kernel reads must still be what was written. Raises
    PlanError.

    Independent of the assignment: it keeps, for each buffer, the name of what it holds.
    """
    holds: dict[int, str] = {}
    roots, given = _roots(graph), external(graph)
    buffer = {o.name: op.attr("at")[i] for op in graph.ops for i, o in enumerate(op.outs)}
    for kernel in kernels(graph):
        inside = internal(graph, kernel)
        made = {o.name for op in kernel.ops for o in op.outs}
        reads = [v for op in kernel.ops for v in op.values if v.name in roots and v.name not in made]
        for value in reads:
            _check_read(value, roots[value.name], buffer, holds, given)
        used: dict[int, str] = {
            buffer[roots[v.name]]: roots[v.name] for v in reads if roots[v.name] not in given
        }
        for op in kernel.ops:
            for name, place, need in _writes(op, inside, given):
                if place in used or need_exceeds(need, graph.arena[place]):
                    raise PlanError(
                        f"%{name} does not fit buffer {place}, or a live value is there: %{used.get(place)}"
                    )
                used[place] = holds[place] = name
    for value in graph.outputs:
        if value.name in roots:
            _check_read(value, roots[value.name], buffer, holds, given)


def _check_read(
    value: Value, root: str, buffer: Mapping[str, int], holds: Mapping[int, str], given: set[str]
) -> None:
    if root not in given and holds.get(buffer[root]) != root:
        raise PlanError(f"%{value.name} is read, but its buffer holds %{holds.get(buffer[root])} by then")


def _writes(op: Op, inside: set[str], given: set[str]) -> Iterable[tuple[str, int, Dim]]:
    """(name, buffer, bytes) of what an op writes to the arena."""
    at = op.attr("at")
    for index, out in enumerate(op.outs):
        if isinstance(out.type, Tensor) and out.name not in inside and out.name not in given:
            yield out.name, at[index], bytes_of(out.type)
    if (need := scratch_bytes(op)) != 0:
        yield scratch_name(op), at[-1], need


def need_exceeds(need: Dim, have: Dim) -> bool:
    a, b = linear_form(need), linear_form(have)
    return any(a[k] > b[k] for k in a)
