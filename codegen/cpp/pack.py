"""Packing weights for the kernels, a few rows at a time, straight into a memory-mapped safetensors file.

The file's pages belong to the page cache; the process itself holds one chunk of rows.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from codegen.cpp.weights import PANEL, PackedWeight
from codegen.evaluate import Evaluator, Reader
from ir.graph import Graph
from ir.types import DType

Array = np.ndarray[Any, np.dtype[Any]]
Report = Callable[[int, int], None]

CHUNK_BYTES = 16 << 20
ALIGNMENT = 64

_SAFETENSORS_NAMES = {
    DType.F64: "F64", DType.F32: "F32", DType.BF16: "BF16", DType.I64: "I64", DType.I32: "I32",
    DType.I8: "I8", DType.U8: "U8", DType.BOOL: "BOOL",
}  # fmt: skip


def pack_weights(
    graph: Graph,
    order: Sequence[PackedWeight],
    reader: Reader,
    path: Path,
    report: Report,
    chunk_bytes: int = CHUNK_BYTES,
) -> None:
    """Write every weight in its layout. report(done, total) counts bytes."""
    total, done = sum(w.bytes for w in order), 0
    offsets, start = _write_header(path, order)
    evaluator = Evaluator(graph, reader)
    for weight, offset in zip(order, offsets, strict=True):
        if weight.bytes:
            file = np.memmap(path, np.uint8, "r+", start + offset, (weight.bytes,))
            _pack(weight, evaluator, file.view(weight.dtype.numpy).reshape(weight.packed_shape), chunk_bytes)
            file.flush()
        done += weight.bytes
        report(done, total)


def _write_header(path: Path, order: Sequence[PackedWeight]) -> tuple[list[int], int]:
    """Write the header and make the file its full length.

    Returns the tensors' offsets and where the data starts. The format allows no holes, so small filler
    tensors keep every weight on a 64-byte boundary.
    """
    entries: dict[str, Any] = {}
    offsets: list[int] = []
    end = 0
    for weight in order:
        offsets.append(end)
        entries[weight.name] = {
            "dtype": _SAFETENSORS_NAMES[weight.dtype],
            "shape": list(weight.packed_shape),
            "data_offsets": [end, end + weight.bytes],
        }
        end += weight.bytes
        if end % ALIGNMENT:
            fill = ALIGNMENT - end % ALIGNMENT
            entries[f"filler.{end}"] = {"dtype": "U8", "shape": [fill], "data_offsets": [end, end + fill]}
            end += fill
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        # Takes the room at once: on a full disk a mapped page that has none is a SIGBUS.
        os.posix_fallocate(file.fileno(), 0, 8 + len(header) + end)
    return offsets, 8 + len(header)


def _pack(weight: PackedWeight, evaluator: Evaluator, out: Array, chunk_bytes: int) -> None:
    step = _chunk_rows(weight, chunk_bytes)
    if weight.layout in ("plain", "table"):
        _pack_plain(weight, evaluator, out, step)
    elif weight.layout == "panels":
        _pack_panels(weight, evaluator, out, range(weight.shape[0]), step)
    else:
        half = weight.shape[0] // 2
        _pack_panels(weight, evaluator, out[0::2], range(half), step)
        _pack_panels(weight, evaluator, out[1::2], range(half, 2 * half), step)


def _pack_plain(weight: PackedWeight, evaluator: Evaluator, out: Array, step: int) -> None:
    if not weight.shape:
        out[...] = evaluator.whole(weight.source)
        return
    for lo in range(0, weight.shape[0], step):
        hi = min(lo + step, weight.shape[0])
        out[lo:hi] = evaluator.rows(weight.source, lo, hi)


def _pack_panels(weight: PackedWeight, evaluator: Evaluator, out: Array, rows: range, step: int) -> None:
    """A range of a matrix's rows as panels; what fills up the last panel and the last pair of K is zero."""
    step = max(PANEL, step // PANEL * PANEL)
    for lo in rows[::step]:
        hi = min(lo + step, rows.stop)
        part = evaluator.rows(weight.source, lo, hi).astype(weight.dtype.numpy, copy=False)
        panel = (lo - rows.start) // PANEL
        target = out[panel : panel + -(-(hi - lo) // PANEL)]
        missing = (len(target) * PANEL - len(part), math.prod(target.shape[1:]) // PANEL - part.shape[1])
        filled = np.pad(part, [(0, n) for n in missing]) if any(missing) else part
        target[...] = filled.reshape(len(target), PANEL, -1, *target.shape[3:]).swapaxes(1, 2)


def _chunk_rows(weight: PackedWeight, chunk_bytes: int) -> int:
    row_bytes = int(np.prod(weight.shape[1:], dtype=np.int64)) * max(4, weight.dtype.size_bytes)
    return max(1, chunk_bytes // max(1, row_bytes))
