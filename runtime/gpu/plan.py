"""plan.json and kernels.json of a GPU target as checked, typed values. See docs/artifact.md.

The files are untrusted: every expression, operand and size is checked when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from runtime.errors import ArtifactError
from runtime.manifest import Fields, parse_json
from runtime.weights import Tensor, parse_read

Sizes = Mapping[str, int]  # T, R, Q, and the widths of tables: M0, M1, ...
Expression = int | str | tuple[str, Any, Any]

MAX_DEPTH = 16
MAX_SIZE = 2**48
MAX_ARGS = 512  # of a launch: CUDA's 4 KiB of parameters
MAX_LAUNCHES = 4096  # of a case
OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "//": lambda a, b: a // b,
    "cdiv": lambda a, b: -(-a // b),
    "min": min,
    "max": max,
}
TYPES = frozenset({"i32", "i64", "u32", "u64", "fp32"})  # of operands that are no pointers


@dataclass(frozen=True, slots=True)
class Operand:
    """kind: "buffer" (of the arena), "weight", "input" (an array given by name) or "size" (a number)."""

    kind: str
    index: int = 0
    name: str = ""
    value: Expression = 0  # bytes into the array, or the number


@dataclass(frozen=True, slots=True)
class Launch:
    kernel: str
    grid: tuple[Expression, ...]
    args: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Case:
    launches: tuple[Launch, ...]
    size: Expression | None
    most: int

    def holds(self, sizes: Sizes) -> bool:
        return self.size is None or evaluate(self.size, sizes) <= self.most


@dataclass(frozen=True, slots=True)
class Entry:
    """One kernel of the schedule: the first case that holds runs."""

    op: str
    loc: str
    cases: tuple[Case, ...]

    def chosen(self, sizes: Sizes) -> int:
        """The number of that case."""
        return next(number for number, case in enumerate(self.cases) if case.holds(sizes))

    def choose(self, sizes: Sizes) -> tuple[Launch, ...]:
        return self.cases[self.chosen(sizes)].launches


@dataclass(frozen=True, slots=True)
class Plan:
    """buffers: bytes of each as (per T, per R, per Q, fixed), for sizes rounded up to 16.

    sample_scratch: bytes that the sampler's sections need as (per row, fixed). weights: what the kernels
    read of them, by their index; None in artifacts of earlier versions.
    """

    buffers: tuple[tuple[int, int, int, int], ...]
    sections: Mapping[str, tuple[Entry, ...]]  # "forward", and the sampler's
    sample_scratch: tuple[int, int] = (0, 0)
    weights: tuple[Tensor, ...] | None = None

    @staticmethod
    def parse(data: bytes, where: str) -> Plan:
        top = Fields(parse_json(data, where), where)
        buffers = tuple(_buffer(fields) for fields in top.objects("buffers", 2**16))
        sections = top.object("sections")
        entries = {name: _entries(sections, name) for name in sections.value}
        if "sample_scratch" not in top.value and entries.keys() <= {"forward"}:
            return Plan(buffers, entries, weights=parse_read(top))
        _, _, per_row, fixed = _buffer(top.object("sample_scratch"))
        return Plan(buffers, entries, (per_row, fixed), parse_read(top))

    def buffer_bytes(self, num_tokens: int, num_requests: int, num_rows: int) -> list[int]:
        t, r, q = (-(-n // 16) * 16 for n in (num_tokens, num_requests, num_rows))
        return [per_t * t + per_r * r + per_q * q + fixed for per_t, per_r, per_q, fixed in self.buffers]


def evaluate(expression: Expression, sizes: Sizes) -> int:
    """Raises KeyError with the name of a size that the step lacks."""
    if isinstance(expression, int):
        return expression
    if isinstance(expression, str):
        return sizes[expression]
    operator, left, right = expression
    return OPERATORS[operator](evaluate(left, sizes), evaluate(right, sizes))


def _buffer(fields: Fields) -> tuple[int, int, int, int]:
    extra = set(fields.value) - {"T", "R", "Q", ""}
    if extra:
        raise fields.bad(min(extra), "one of T, R, Q and the empty name")
    t, r, q, fixed = (fields.integer(k, 0, MAX_SIZE) if k in fields.value else 0 for k in ("T", "R", "Q", ""))
    return t, r, q, fixed


def _entries(sections: Fields, name: str) -> tuple[Entry, ...]:
    return tuple(_entry(fields) for fields in sections.objects(name, 2**20))


def _entry(fields: Fields) -> Entry:
    cases = tuple(_case(case) for case in fields.objects("cases", 64))
    if not cases or cases[-1].size is not None:
        raise fields.bad("cases", "a list whose last case has no condition")
    return Entry(fields.text("op"), fields.text("loc"), cases)


def _case(fields: Fields) -> Case:
    launches = tuple(_launch(launch) for launch in fields.objects("launches", MAX_LAUNCHES))
    if fields.get("when") is None:
        return Case(launches, None, 0)
    when = fields.array("when", 2)
    if len(when) != 2 or type(when[1]) is not int:
        raise fields.bad("when", "an expression and the most that it may be")
    return Case(launches, _expression(when[0], fields, "when"), when[1])


def _launch(fields: Fields) -> Launch:
    grid = fields.array("grid", 3)
    args = tuple(_operand(arg) for arg in fields.objects("args", MAX_ARGS))
    if not grid:
        raise fields.bad("grid", "one to three sizes")
    return Launch(fields.text("kernel"), tuple(_expression(g, fields, "grid") for g in grid), args)


def _operand(fields: Fields) -> Operand:
    kinds = [kind for kind in ("buffer", "weight", "input", "size") if kind in fields.value]
    if len(kinds) != 1:
        what = "an operand must be one of buffer, weight, input and size"
        raise ArtifactError(what, where=fields.where, todo="Compile the model again")
    kind = kinds[0]
    if kind == "size":
        return Operand(kind, value=_expression(fields.get("size"), fields, "size"))
    offset = _expression(fields.value.get("offset", 0), fields, "offset")
    if kind == "input":
        return Operand(kind, name=fields.text("input"), value=offset)
    return Operand(kind, index=fields.integer(kind), value=offset)


def _expression(value: Any, fields: Fields, name: str, depth: int = 0) -> Expression:
    if type(value) is int and abs(value) <= MAX_SIZE:
        return value
    if isinstance(value, str) and len(value) <= 16:
        return value
    if isinstance(value, list) and len(value) == 3 and value[0] in tuple(OPERATORS) and depth < MAX_DEPTH:
        left, right = (_expression(v, fields, name, depth + 1) for v in value[1:])
        if value[0] in ("//", "cdiv") and (not isinstance(right, int) or right < 1):
            raise fields.bad(name, "an expression whose divisors are positive integers")
        return (value[0], left, right)
    raise fields.bad(name, "an integer, a size's name, or [operator, left, right]")
