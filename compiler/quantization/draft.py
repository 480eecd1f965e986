"""The draft that an artifact bundles: the model itself with int4 weights, on the KV blocks of the model.

It guesses what the model will say, and the model verifies (runtime/speculation): how often it agrees with the
model decides how fast that is, and nothing else. So it is measured, and never refused. Its keys and values
are read by the model and the model's by it: both have the cache's format, and the same shift and scale of
keys, found once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compiler.errors import CompileError
from compiler.importers.model import Imported
from compiler.progress import Progress
from compiler.quantization import report
from compiler.quantization.decide import Decision
from compiler.quantization.gate import Divergence, divergence
from compiler.quantization.options import AUTO, Quantization, check_quantization
from compiler.quantization.step import Quantizer
from compiler.quantization.store import Store
from compiler.weights import LayeredSource
from ir.dims import evaluate, product
from ir.graph import Graph, tensor_of
from ir.types import DType

SELF_INT4 = "self:int4"
DRAFTS = (SELF_INT4,)
_WITHOUT = "Leave it out: the model is as small as its draft would be"


def draft_quantization(asked: Quantization) -> Quantization:
    """How the draft of a model is, for which that was asked. Algorithm and text are those that were given. An
    asymmetric grid makes it right more often by more than its bytes make it slower."""
    return Quantization(
        "int4", algorithm=asked.algorithm, symmetric=False, kv=asked.kv, calibration=asked.calibration
    ).resolved(("cpu",))


def check_draft(draft: str, asked: Quantization, devices: Sequence[str]) -> None:
    """Raises CompileError. devices: the kinds that are compiled for."""
    where = f"--draft {draft}"
    if draft not in DRAFTS:
        raise CompileError("unknown", where=where, todo=f"There is {', '.join(DRAFTS)}")
    if "cpu" not in devices:
        todo = "Add --target cpu, or leave it out: there draft with lookup, or with another artifact"
        raise CompileError("only the target cpu has a draft of its own", where=where, todo=todo)
    if asked.weights in ("int4", AUTO):
        raise CompileError(f"with --quantize {asked.weights} it is int4 already", where=where, todo=_WITHOUT)
    check_quantization(replace(draft_quantization(asked), kv=None))


def own_part(asked: Quantization) -> Quantization:
    """What of the options is the model's own, where a draft shares them: nothing is fitted of some."""
    return asked if asked.weights == "int8" else replace(asked, algorithm=None, calibration=None)


def check_imported(imported: Imported, draft: str) -> None:
    """Raises CompileError where most weights that the checkpoint's own codes stand for are of 4 bits."""
    sizes = {True: 0, False: 0}
    for op in imported.graph.ops:
        if op.kind == "dequantize":
            codes = tensor_of(op.args[0])
            sizes[codes.dtype is DType.U4] += int(evaluate(product(codes.shape), {}))
    if sizes[True] > sizes[False]:
        raise CompileError("the checkpoint's own codes are int4", where=f"--draft {draft}", todo=_WITHOUT)


class DraftQuantizer(Quantizer):
    """Of the draft. model: the quantiser of what it drafts for, which has decided."""

    def __init__(
        self, asked: Quantization, imported: Imported, store: Store, progress: Progress, model: Quantizer
    ) -> None:
        super().__init__(asked, imported, store, progress)
        self._model = model
        self.agreement: Divergence | None = None  # on _text
        self._text = ""

    def read(self, name: str) -> Any:
        shared = name in self._model.store.names and name not in self.store.names
        return self._model.store.read(name) if shared else super().read(name)

    def imported(self) -> Imported:
        return replace(
            self._imported, weights=LayeredSource([self.store, self._model.store, self._imported.weights])
        )

    def entry(self) -> dict[str, Any]:
        """The manifest's: how it is quantised, and how far it is from the model."""
        found = self.agreement
        error = None if found is None else report.divergence_entry(found, self._text)
        return {
            "weights": self.asked.weights,
            "group": self.decided.weights.group_size,
            "algorithm": self.asked.algorithm,
            "nearest": list(self.decided.nearest),
            "activations": self.asked.activations,
            "error": error,
        }

    def _decision(self, graph: Graph, asked: Quantization) -> Decision:
        return replace(super()._decision(graph, asked), keys=self._model.decided.keys)

    def _measure(self, decision: Decision) -> None:
        windows = decision.held_out()
        self._text = windows.source
        self.agreement = divergence(
            self._model.quantized, self._model.read, self.quantized, self.read, windows, decision.report
        )
        self._progress.note(f"  draft, beside the model: {report.figures(self.agreement)}")
