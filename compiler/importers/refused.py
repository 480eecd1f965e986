"""The error of everything that imports."""

from __future__ import annotations

from compiler.errors import CompileError
from ir.graph import Graph

OTHER_OPS = (
    "Octavo has no such op yet: choose another model, or write that part of it with ops that have a converter"
)
OTHER_FILE = "Compile the Hugging Face checkpoint that the file was made from"


class ImportRefused(CompileError):
    """A model cannot be imported: what, where in the model or the checkpoint, and what to do next.

    op, module, source_line: the exported op that stands in the way, its module's path, and the line of the
    model's source. reached: the graph up to there.
    """

    op = module = source_line = ""
    reached: Graph | None = None

    def at(self, op: str, module: str, line: str) -> ImportRefused:
        """Say which op it is about."""
        self.op, self.module, self.source_line = op, module, line
        return self


def one_line(error: Exception, most: int = 400) -> str:
    """What another library's error says, with its type, on one line."""
    text = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return text if len(text) <= most else text[: most - 3] + "..."
