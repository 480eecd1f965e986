"""What a compile tells its caller while it runs. The base class says nothing; the command prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ir.graph import Graph
    from ir.rewrite import Miss


class Progress:
    """Receives a compile's stages in order: import, one per pass, generate, pack, build, hash, verify."""

    def note(self, text: str) -> None:
        """A line worth reading, such as what is about to be built and how large it is."""

    def stage(self, name: str) -> None:
        """A stage begins, and the one before it has ended."""

    def advance(self, done: int, total: int) -> None:
        """How far the current stage is, in units of its own."""

    def graph(self, name: str, graph: Graph, count: int, misses: Sequence[Miss]) -> None:
        """A pass has run: its graph, how many places it changed, and its near misses."""

    def lowered(self, graph: Graph) -> None:
        """The graph that code is generated from."""

    def sources(self, files: Mapping[str, str]) -> None:
        """The generated source, by file name."""
