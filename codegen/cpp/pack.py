"""Packing weights for the kernels, a few rows at a time, straight into a memory-mapped safetensors file.

The file's pages belong to the page cache; the process itself holds one chunk of rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from codegen.cpp.weights import Evaluator, PackedWeight, Reader
from ir.graph import Graph
from ir.types import DType

Array = np.ndarray[Any, np.dtype[Any]]
Report = Callable[[int, int], None]

CHUNK_BYTES = 16 << 20
ALIGNMENT = 64

_SAFETENSORS_NAMES = {
    DType.F64: "F64", DType.F32: "F32", DType.BF16: "BF16", DType.I64: "I64", DType.I32: "I32", DType.I8:
    "I8",
    DType.U8: "U8", DType.BOOL: "BOOL",
}  # fmt: skip


def pack_weights(
    graph: Graph, order: Sequence[PackedWeight], reader: Reader, path: Path, report: Report
) -> None:
    """Write every weight in its layout. report(done, total) counts bytes."""
    total = sum(w.bytes for w in order)
    offsets, start, size = _write_header(path, order)
    if size == start:
        return
    evaluator, done = Evaluator(graph, reader), 0
    for weight, offset in zip(order, offsets, strict=True):
        file = (
            np.memmap(path, np.uint8, "r+", start + offset, (max(weight.bytes, 1),)) if weight.bytes else None
        )
        if file is not None:
            _pack(
                weight, evaluator, file[: weight.bytes].view(weight.dtype.numpy).reshape(weight.packed_shape)
            )
            file.flush()
        done += weight.bytes
        report(done, total)


def _write_header(path: Path, order: Sequence[PackedWeight]) -> tuple[list[int], int, int]:
    """Write the header and make the file its full length. Returns the tensors' offsets, where data starts,
    the length.

    The format allows no holes, so small filler tensors keep every weight on a 64-byte boundary.
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
        file.truncate(8 + len(header) + end)
    return offsets, 8 + len(header), 8 + len(header) + end


def _pack(weight: PackedWeight, evaluator: Evaluator, out: Array) -> None:
    if weight.layout in ("plain", "table"):
        _pack_plain(weight, evaluator, out)
    elif weight.layout == "panels":
        _pack_panels(weight, evaluator, out, 0, weight.shape[0])
    else:
        half = weight.shape[0] // 2
        _pack_panels(weight, evaluator, out[0::2], 0, half)
        _pack_panels(weight, evaluator, out[1::2], half, weight.shape[0])


def _pack_plain(weight: PackedWeight, evaluator: Evaluator, out: Array) -> None:
    if not weight.shape:
        out[...] = evaluator.whole(weight.source)
        return
    step = _chunk_rows(weight)
    for lo in range(0, weight.shape[0], step):
        hi = min(lo + step, weight.shape[0])
        out[lo:hi] = evaluator.rows(weight.source, lo, hi)


def _pack_panels(weight: PackedWeight, evaluator: Evaluator, out: Array, first: int, last: int) -> None:
    """Rows first..last of a matrix as panels; rows that fill up the last panel are zero."""
    step = max(16, _chunk_rows(weight) // 16 * 16)
    for lo in range(first, last, step):
        hi = min(lo + step, last)
        rows = evaluator.rows(weight.source, lo, hi).astype(weight.dtype.numpy, copy=False)
        whole, rest = (hi - lo) // 16, (hi - lo) % 16
        panel = (lo - first) // 16
        out[panel : panel + whole] = rows[: whole * 16].reshape(whole, 16, rows.shape[1]).transpose(0, 2, 1)
        if rest:
            out[panel + whole] = 0
            out[panel + whole, :, :rest] = rows[whole * 16 :].T


def _chunk_rows(weight: PackedWeight) -> int:
    row_bytes = int(np.prod(weight.shape[1:], dtype=np.int64)) * max(4, weight.dtype.size_bytes)
    return max(1, CHUNK_BYTES // max(1, row_bytes))
