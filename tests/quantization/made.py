"""A small decoder that was never trained, its graph paged, for calibration and the gate."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compiler.importers import Imported, ModelInfo
from compiler.pipeline import pipeline, run_pipeline
from compiler.quantization.decide import Decision
from compiler.quantization.options import Quantization
from compiler.quantization.store import Store
from compiler.weights import ArraySource
from ir.graph import Graph
from tests.compiler.decoder import Decoder

VOCAB, CONTEXT, LAYERS = 40, 48, 2


def imported(broken: str = "", value: float = np.nan) -> Imported:
    """broken: a weight that has one element of `value`."""
    graph = Decoder(windows=[None, 8], heads=4, kv_heads=2, size=8, vocab=VOCAB, context=CONTEXT).graph()
    rng = np.random.default_rng(3)
    arrays = {w.name: rng.normal(size=w.type.shape, scale=0.15).astype(np.float32) for w in graph.weights}  # type: ignore[union-attr]
    for name in arrays:
        arrays[name] += np.float32("norm" in name)
    if broken:
        arrays[broken].flat[5] = value
    return Imported(graph, ArraySource(arrays), ModelInfo("made", VOCAB, CONTEXT))


def paged(model: Imported, block: int = 16) -> Graph:
    passes = pipeline(read=model.weights.read, block=block)
    return run_pipeline(model.graph, passes[: [p.name for p in passes].index("quantize_weights")])


def decision(folder: Path, asked: Quantization, model: Imported | None = None) -> Decision:
    model = imported() if model is None else model
    block = 64 if asked.kv in ("int4", "int2") else 16
    return Decision(asked.resolved(["cpu"]), paged(model, block), model, Store(folder))
