"""Runs an imported graph with the reference interpreter beside the model that it was imported from."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from compiler.importers import Imported
from compiler.weights import read_as
from ir.interpret import interpret

TOLERANCE = 1e-4  # of the reference logits' standard deviation


def run(imported: Imported, ids: Any) -> Any:
    """Logits [1, S, V] of token ids [1, S]."""
    weights = {w.name: read_as(imported.weights, w) for w in imported.graph.weights}
    positions = np.arange(ids.shape[1], dtype=np.int32)[None]
    return interpret(imported.graph, {"ids": ids.astype(np.int32), "pos": positions}, weights).outputs[0]


def worst(imported: Imported, model: Any, length: int, vocab_size: int) -> float:
    """The largest difference of logits over all positions, in standard deviations of the reference's."""
    ids = np.random.default_rng(length).integers(0, vocab_size, (1, length))
    with torch.no_grad():
        out = model(torch.tensor(ids))
    expected = (out if isinstance(out, torch.Tensor) else out.logits).float().numpy()
    found = run(imported, ids)
    assert found.shape == expected.shape and np.isfinite(found).all()
    return float(np.abs(found - expected).max() / expected.std())
