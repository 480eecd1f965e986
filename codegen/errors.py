"""What code generation refuses, and what building fails with."""

from __future__ import annotations

from collections.abc import Sequence

from ir.graph import Op
from ir.ops import ANNOTATIONS
from ir.text import print_op

REPORT = "Report it, with the files that --dump-ir DIR writes"


class CodegenError(ValueError):
    """A lowered graph that a target cannot run.

    op: what stands in the way, None where it is the graph itself. shown: the ops of its kernel, as text.
    """

    def __init__(self, reason: str, op: Op | None = None, kernel: Sequence[Op] = ()) -> None:
        self.reason, self.op = reason, op
        self.shown = "\n".join(f"  {describe(each)}" for each in kernel or filter(None, [op]))
        where = f"{op.loc}: " if op is not None and op.loc else ""
        super().__init__(f"{where}{reason}" + (f"\n{self.shown}" if self.shown else ""))


class BuildError(RuntimeError):
    """A source that cannot be built, or a tool that is missing. said: the tool's own words, in lines."""

    def __init__(self, what: str, *, where: str = "", todo: str = "", said: str = "") -> None:
        self.what, self.where, self.todo, self.said = what, where, todo, said
        head = f"{where}: {what}" if where else what
        super().__init__(f"{head}. {todo}" if todo else head, *filter(None, [said]))

    def __str__(self) -> str:
        return "\n".join(self.args)


class PackError(BuildError):
    """Weights that no kernel can read: a number among them is none."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(what, where=f"weights {name}", todo="Get an undamaged copy of the checkpoint")


def describe(op: Op) -> str:
    """An op's text without what passes have noted on it."""
    shown = {name: value for name, value in op.attrs.items() if name not in ANNOTATIONS}
    return print_op(Op(op.kind, op.args, shown, op.outs, op.loc)).strip()
