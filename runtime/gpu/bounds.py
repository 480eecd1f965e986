"""Whether a plan's launches stay inside their memory, and inside what a device takes, in every step up to the
limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from runtime.errors import ArtifactError
from runtime.gpu.device import KernelSpec
from runtime.gpu.plan import OPERATORS, Expression, Launch, Operand, Plan, Sizes

MAX_GRID = (2**31 - 1, 2**16 - 1, 2**16 - 1)  # of CUDA; HIP takes no less
NUMBERS = {
    "i32": (-(2**31), 2**31 - 1),
    "i64": (-(2**63), 2**63 - 1),
    "u32": (0, 2**32 - 1),
    "u64": (0, 2**64 - 1),
}


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes of what a section is given: buffers and weights by number, arrays by name. sizes: the most that
    each may be; all start at 0.
    """

    buffers: Sequence[int]
    weights: Sequence[int]
    arrays: Mapping[str, int]
    sizes: Sizes


def check_bounds(plan: Plan, specs: Sequence[KernelSpec], rooms: Mapping[str, Room]) -> None:
    """rooms: by section. The plan's names and numbers were found good before (runtime.gpu.program).

    Raises ArtifactError.
    """
    types = {spec.name: [type_ for _, type_ in spec.signature] for spec in specs}
    for section, room in rooms.items():
        for launch in _launches(plan, section):
            fault = _fault(launch, types[launch.kernel], room)
            if fault is not None:
                where = f"plan.json, section {section}, kernel {launch.kernel}"
                raise ArtifactError(fault, where=where, todo="Compile the model again")


def span(expression: Expression, most: Sizes) -> tuple[int, int]:
    """The least and the most that an expression may be where each size is from 0 to its most.

    Operators rise or fall in each operand, so the ends are among those of the operands.
    """
    if isinstance(expression, int):
        return expression, expression
    if isinstance(expression, str):
        return 0, most[expression]
    operator, *operands = expression
    left, right = (span(operand, most) for operand in operands)
    ends = [OPERATORS[operator](a, b) for a in left for b in right]
    return min(ends), max(ends)


def _launches(plan: Plan, section: str) -> Iterator[Launch]:
    return (launch for entry in plan.sections[section] for case in entry.cases for launch in case.launches)


def _fault(launch: Launch, types: Sequence[str], room: Room) -> str | None:
    for size, limit in zip(launch.grid, MAX_GRID, strict=False):
        low, high = span(size, room.sizes)
        if low < 0 or high > limit:
            return f"a grid of {low:,} to {high:,} programs; 0 to {limit:,} can run"
    for number, (arg, type_) in enumerate(zip(launch.args, types, strict=True)):
        low, high = span(arg.value, room.sizes)
        least, limit = NUMBERS.get(type_, (low, high)) if arg.kind == "size" else (0, _bytes(arg, room))
        if low < least or high > limit:
            return f"operand {number}, a {arg.kind}, is {low:,} to {high:,}; it may be {least:,} to {limit:,}"
    return None


def _bytes(arg: Operand, room: Room) -> int:
    if arg.kind == "input":
        return room.arrays[arg.name]
    return (room.buffers if arg.kind == "buffer" else room.weights)[arg.index]
