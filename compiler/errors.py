"""The base of every error that a user of the compiler can cause."""

from __future__ import annotations

from runtime.errors import OctavoError


class CompileError(OctavoError):
    """What was wrong, where (a file, an op and its place in the model, an option), and what to do next.

    The command exits with code 2 and prints just this, on one line. shown: what helps to see it (the op, what
    a tool said), in lines of its own after that.
    """

    def __init__(self, what: str, *, where: str = "", todo: str = "", shown: str = "") -> None:
        super().__init__(what, where=where, todo=todo)
        self.shown = shown

    @property
    def line(self) -> str:
        """Without what is shown after it."""
        return super().__str__()

    def __str__(self) -> str:
        return f"{self.line}\n{self.shown}" if self.shown else self.line


class CompilerFault(CompileError):
    """A fault of Octavo's, found by a check of its own. The command exits with code 1 and says how to report
    it."""
