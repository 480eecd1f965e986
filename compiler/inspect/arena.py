"""A target's memory plan over the kernels of a step: which value lies where from when to when."""

from __future__ import annotations

from dataclasses import dataclass

from ir.graph import Graph
from passes.memory.schedule import Kernel, Schedule
from passes.memory.sizes import SIZES, linear_form, scratch_bytes, scratch_name
from passes.plan_memory import lifetimes

Form = tuple[int, int, int, int]  # bytes per T, R and Q, each rounded up to 16, and so many more


@dataclass(frozen=True)
class Piece:
    """Memory of one value, or an op's scratch space: the kernels that need it, first to last."""

    name: str
    scratch: bool
    buffer: int
    first: int
    last: int
    form: Form


@dataclass(frozen=True)
class ArenaPlan:
    """buffers: one after the other in the arena. kernels: the ops that run, in order."""

    kernels: tuple[Kernel, ...]
    buffers: tuple[Form, ...]
    pieces: tuple[Piece, ...]


def arena_plan(graph: Graph, device: str) -> ArenaPlan | None:
    """device: "cpu" or "gpu". None where memory is not planned yet."""
    if not graph.arena:
        return None
    schedule = Schedule.of(graph)
    buffer = {out.name: op.attr("at")[i] for op in graph.ops for i, out in enumerate(op.outs)}
    scratch = {scratch_name(op): op.attr("at")[-1] for op in graph.ops if scratch_bytes(op, device) != 0}
    last = len(schedule.kernels) - 1
    pieces = tuple(
        Piece(
            life.name,
            life.name in scratch,
            scratch[life.name] if life.name in scratch else buffer[life.name],
            life.first,
            min(life.last, last),
            _form(life.bytes),
        )
        for life in lifetimes(schedule, device)
    )
    return ArenaPlan(schedule.kernels, tuple(_form(size) for size in graph.arena), pieces)


def _form(size: object) -> Form:
    found = linear_form(size)  # pyright: ignore[reportArgumentType]
    t, r, q, fixed = (found[name] for name in (*SIZES, ""))
    return t, r, q, fixed
