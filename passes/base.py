"""What a pass is: a frozen dataclass whose fields are its options, and a `run` from graph to graph."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from ir.graph import Graph, Op
from ir.rewrite import Miss, Rewritten
from ir.text.printer import print_op

BF16_ERROR = 0.05  # tolerance of a pass that rounds to bf16, 8 bits of mantissa


@dataclass(frozen=True)
class Note:
    """What a pass wants said of an op that it made, such as how a mask was proved."""

    op: Op
    text: str


@dataclass(frozen=True)
class Result:
    """A pass's graph, how many places it changed, reasons for near misses, and notes on what it made."""

    graph: Graph
    count: int
    misses: tuple[Miss, ...] = ()
    notes: tuple[Note, ...] = ()


@dataclass(frozen=True)
class Pass(ABC):
    """One step of the pipeline. Its name is its file's name: the class name in snake case."""

    @property
    def name(self) -> str:
        return pass_name(type(self))

    @property
    def tolerance(self) -> float:
        """The error that the pass adds by design, as a share of a value's RMS; 0 if it only reassociates."""
        return 0.0

    @abstractmethod
    def run(self, graph: Graph) -> Result:
        """The next graph. Raises PassError where a lowering cannot be proved."""


class PassError(ValueError):
    """A model cannot be lowered soundly. `op` is the op that stands in the way."""

    def __init__(self, pass_name: str, op: Op | None, reason: str, hint: str = "") -> None:
        self.pass_name, self.op, self.reason, self.hint = pass_name, op, reason, hint
        where = f" at {op.loc or print_op(op)}" if op is not None else ""
        shown = f"\n  {print_op(op)}" if op is not None else ""
        super().__init__(f"{pass_name}: {reason}{where}{shown}" + (f"\n{hint}" if hint else ""))


def pass_name(kind: type[Any]) -> str:
    """FuseNorm -> fuse_norm."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.__name__).lower()


def result(rewritten: Rewritten) -> Result:
    """The result of a pass that is one set of rewriting rules."""
    return Result(rewritten.graph, rewritten.count, rewritten.misses)
