"""Quantisation as a step of a compile: decide, fit, measure, raise what is too coarse, refuse what does not
fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from compiler.importers.model import Imported
from compiler.progress import Progress
from compiler.quantization import report
from compiler.quantization.auto import raise_until
from compiler.quantization.decide import Decided, Decision
from compiler.quantization.options import AUTO, Quantization
from compiler.quantization.store import Store
from compiler.weights import LayeredSource, read_as
from ir.graph import Graph

STAGES = ("calibrate", "measure")


class Quantizer:
    """Of one compile. decided: the passes' options, once `decide` has run."""

    def __init__(self, asked: Quantization, imported: Imported, store: Store, progress: Progress) -> None:
        self.asked, self.decided = asked, Decided()
        self.store = store
        self._imported, self._progress = imported, progress
        self._graph = imported.graph  # paged, once `decide` has it
        self._weights = {weight.name: weight for weight in imported.graph.weights}

    @property
    def stages(self) -> tuple[str, ...]:
        return STAGES if self.asked.any else ()

    def decide(self, graph: Graph, stage: Callable[[str], None], *, weights: bool) -> Decided:
        """For a paged graph. stage: is told of each that begins. weights: False where there are only
        shapes.

        Raises CompileError for a model that is too far from what it was, with figures and what to do.
        """
        self._graph = graph
        if not self.asked.any:
            return self.decided
        stage("calibrate")
        decision = self._decision(graph, self.asked if weights else replace(self.asked, algorithm="rtn"))
        self.decided = decision.first(weights=weights)
        stage("measure")
        if weights and self.asked.changes:
            self._measure(decision)
        return self.decided

    @property
    def quantized(self) -> Graph:
        """What was decided of the paged graph."""
        return self.decided.run(self._graph)

    def _decision(self, graph: Graph, asked: Quantization) -> Decision:
        told = self._progress
        return Decision(asked, graph, self._imported, self.store, told.advance, told.note)

    def _measure(self, decision: Decision) -> None:
        windows = decision.held_out()
        self.decided = decision.measured(self.decided, windows)
        if self.asked.weights == AUTO:
            self.decided = raise_until(decision, self.decided, windows, self.asked.limit())
            self._note_raised()
        if self.decided.measured is not None:
            self._progress.note(f"  quantised: {report.figures(self.decided.measured.divergence)}")
        report.check(self.asked, self.decided)

    def _note_raised(self) -> None:
        count, of = len(self.decided.raised), len(self.decided.formats)
        shown = "".join(f"\n    {each}" for each in self.decided.raised)
        self._progress.note(f"  raised {count} of {of} matrices to fit the bound{shown}")

    def imported(self) -> Imported:
        """With the arrays that were fitted among its weights."""
        if not self.store.names:
            return self._imported
        return replace(self._imported, weights=LayeredSource([self.store, self._imported.weights]))

    def read(self, name: str) -> Any:
        """A weight's array, in the element type that the graph gives it."""
        if name in self.store.names:
            return self.store.read(name)
        return read_as(self._imported.weights, self._weights[name])

    def entry(self) -> dict[str, Any] | None:
        """The manifest's model.quantization; None where nothing is quantised."""
        return report.entry(self.asked, self.decided) if self.asked.any else None
