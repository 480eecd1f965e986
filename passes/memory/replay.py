"""Checking a memory plan, independently of how it was made."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ir.dims import Dim
from ir.graph import Graph, Value
from ir.types import Tensor
from passes.memory.schedule import Kernel, Schedule
from passes.memory.sizes import PlanError, bytes_of, exceeds, scratch_bytes, scratch_name


def check_plan(graph: Graph, device: str = "cpu") -> None:
    """Replays the plan: what a kernel reads must still be what was written. Raises PlanError.

    Independent of the assignment: it keeps, for each buffer, the name of what it holds.
    """
    schedule = Schedule.of(graph)
    buffer = {o.name: op.attr("at")[i] for op in graph.ops for i, o in enumerate(op.outs)}
    replay = _Replay(schedule, buffer, device)
    for kernel in schedule.kernels:
        replay.run(kernel)
    for value in graph.outputs:
        replay.read(value)


@dataclass
class _Replay:
    schedule: Schedule
    buffer: Mapping[str, int]
    device: str
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
            if (need := scratch_bytes(op, self.device)) != 0:
                yield scratch_name(op), at[-1], need
