"""Packing weights in the layouts that the C++ kernels read."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from codegen.cpp.weights import PANEL, PackedWeight
from codegen.evaluate import Evaluator, Reader
from codegen.packing import CHUNK_BYTES, Array, Report, chunk_rows, fill_rows, write_tensors
from ir.graph import Graph


def pack_weights(
    graph: Graph,
    order: Sequence[PackedWeight],
    reader: Reader,
    path: Path,
    report: Report,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Write every weight in its layout. report(done, total) counts bytes."""
    evaluator = Evaluator(graph, reader)
    write_tensors(path, order, lambda weight, out: _pack(weight, evaluator, out, chunk_bytes), report)


def _pack(weight: PackedWeight, evaluator: Evaluator, out: Array, chunk_bytes: int) -> None:
    step = chunk_rows(weight, chunk_bytes)
    if weight.layout in ("plain", "table"):
        fill_rows(weight, evaluator, out, chunk_bytes)
    else:
        halves, count = (2 if weight.layout == "paired" else 1), weight.experts
        rows = weight.shape[0] // count // halves
        for part in range(count * halves):
            first = part // halves * weight.panels + part % halves
            panels = out[first : first + weight.panels : halves]
            _pack_panels(weight, evaluator, panels, range(part * rows, (part + 1) * rows), step)


def _pack_panels(weight: PackedWeight, evaluator: Evaluator, out: Array, rows: range, step: int) -> None:
    """A range of a matrix's rows as panels."""
    step = max(PANEL, step // PANEL * PANEL)
    for lo in rows[::step]:
        hi = min(lo + step, rows.stop)
        panel = (lo - rows.start) // PANEL
        target = out[panel : panel + -(-(hi - lo) // PANEL)]
        if weight.matrix is not None:
            parts = tuple(None if p is None else evaluator.rows(p, lo, hi) for p in weight.matrix.parts)
            weight.matrix.pack(weight.name, parts, target)
        else:
            _fill_panels(evaluator.rows(weight.source, lo, hi).astype(weight.dtype.numpy, copy=False), target)


def _fill_panels(part: Array, target: Array) -> None:
    """What fills up the last panel and the last pair of K is zero."""
    missing = (len(target) * PANEL - len(part), math.prod(target.shape[1:]) // PANEL - part.shape[1])
    filled = np.pad(part, [(0, n) for n in missing]) if any(missing) else part
    target[...] = filled.reshape(len(target), PANEL, -1, *target.shape[3:]).swapaxes(1, 2)
