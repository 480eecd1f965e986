"""What a compile tells its caller while it runs. The base class says nothing; the command prints."""

from __future__ import annotations

from typing import Any


class Progress:
    """Receives a compile's stages in order: import, one per pass, generate, pack, build, verify."""

    def note(self, text: str) -> None:
        """A line worth reading, such as what is about to be built and how large it is."""

    def stage(self, name: str) -> None:
        """A stage begins, and the one before it has ended."""

    def advance(self, done: int, total: int) -> None:
        """How far the current stage is, in units of its own."""

    def graph(self, stage: Any) -> None:
        """A pass has run: its graph, its count and its reasons (compiler.pipeline.Stage)."""

    def sources(self, files: dict[str, str]) -> None:
        """The generated source, by file name."""
