"""What a compile tells its caller while it runs. The base class says nothing; the command prints."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiler.flight import Preflight
    from ir.graph import Graph
    from ir.rewrite import Miss


class Progress:
    """Receives a compile's stages in order: import, one per pass, generate, pack, build, hash, verify."""

    def preflight(self, found: Preflight) -> None:
        """What the compile is about to read, write and take. Nothing was done yet."""

    def stages(self, names: Sequence[str]) -> None:
        """The stages that are to come, all of them, in order."""

    def note(self, text: str) -> None:
        """A line worth reading, such as what could not be tried on this machine."""

    def stage(self, name: str) -> None:
        """A stage begins, and the one before it has ended."""

    def advance(self, done: int, total: int) -> None:
        """How far the current stage is, in units of its own: bytes packed and hashed, kernels built."""

    def graph(self, name: str, graph: Graph, count: int, misses: Sequence[Miss]) -> None:
        """A pass has run: its graph, how many places it changed, and its near misses."""

    def lowered(self, graph: Graph) -> None:
        """The graph that code is generated from."""

    def sources(self, files: Mapping[str, str]) -> None:
        """The generated source, by file name."""


class Stopwatch:
    """Passes stages on, and counts the CPU seconds of each, those of programs that ended within it too."""

    def __init__(self, progress: Progress) -> None:
        self.cpu_s: dict[str, float] = {}
        self._progress, self._name, self._since = progress, "", 0.0

    def stage(self, name: str) -> None:
        self.stop()
        self._name, self._since = name, _cpu_seconds()
        self._progress.stage(name)

    def stop(self) -> None:
        """The current stage has ended."""
        if self._name:
            self.cpu_s[self._name] = self.cpu_s.get(self._name, 0.0) + _cpu_seconds() - self._since
        self._name = ""


def _cpu_seconds() -> float:
    return sum(os.times()[:4])
