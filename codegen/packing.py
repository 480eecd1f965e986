"""Writing packed weights, a few rows at a time, straight into a memory-mapped safetensors file.

The file's pages belong to the page cache; the process itself holds one chunk of rows. Layouts are a target's
own, but for the plain one: the rows as the graph has them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from codegen.evaluate import Evaluator
from ir.graph import Value, Weight
from ir.types import DType

Array = np.ndarray[Any, np.dtype[Any]]
Report = Callable[[int, int], None]

CHUNK_BYTES = 16 << 20
ALIGNMENT = 64

_SAFETENSORS_NAMES = {
    DType.F64: "F64", DType.F32: "F32", DType.F16: "F16", DType.BF16: "BF16", DType.I64: "I64",
    DType.I32: "I32", DType.I8: "I8", DType.U8: "U8", DType.BOOL: "BOOL",
}  # fmt: skip


class Packed(Protocol):
    """An array of the file. source: the weight, or the value computed from weights, of which `shape` is."""

    @property
    def name(self) -> str: ...
    @property
    def source(self) -> Weight | Value: ...
    @property
    def dtype(self) -> DType: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def packed_shape(self) -> tuple[int, ...]: ...
    @property
    def bytes(self) -> int: ...


P = TypeVar("P", bound=Packed)


def write_tensors(path: Path, order: Sequence[P], fill: Callable[[P, Array], None], report: Report) -> None:
    """Write a file of the arrays, each filled in by fill(array, room). report(done, total) counts bytes."""
    total, done = sum(w.bytes for w in order), 0
    offsets, start = _write_header(path, order)
    for packed, offset in zip(order, offsets, strict=True):
        if packed.bytes:
            file = np.memmap(path, np.uint8, "r+", start + offset, (packed.bytes,))
            fill(packed, file.view(packed.dtype.numpy).reshape(packed.packed_shape))
            file.flush()
        done += packed.bytes
        report(done, total)


def listed(order: Sequence[Packed]) -> list[dict[str, Any]]:
    """What the generated code reads, in its order, as plan.json has it."""
    return [
        {"name": w.name, "dtype": _SAFETENSORS_NAMES[w.dtype], "shape": list(w.packed_shape)} for w in order
    ]


def _write_header(path: Path, order: Sequence[Packed]) -> tuple[list[int], int]:
    """Write the header and make the file its full length.

    Returns the tensors' offsets and where the data starts. The format allows no holes, so small filler
    tensors keep every weight on a 64-byte boundary.
    """
    entries: dict[str, Any] = {}
    offsets: list[int] = []
    end = 0
    taken = {packed.name for packed in order}
    for packed in order:
        offsets.append(end)
        entries[packed.name] = {
            "dtype": _SAFETENSORS_NAMES[packed.dtype],
            "shape": list(packed.packed_shape),
            "data_offsets": [end, end + packed.bytes],
        }
        end += packed.bytes
        if end % ALIGNMENT:
            fill = ALIGNMENT - end % ALIGNMENT
            name = _unused(f"filler.{end}", taken)
            entries[name] = {"dtype": "U8", "shape": [fill], "data_offsets": [end, end + fill]}
            end += fill
    header = json.dumps(entries).encode()
    header += b" " * (-(len(header) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        # Takes the room at once: on a full disk a mapped page that has none is a SIGBUS.
        os.posix_fallocate(file.fileno(), 0, 8 + len(header) + end)
    return offsets, 8 + len(header)


def _unused(name: str, taken: set[str]) -> str:
    while name in taken:
        name += "_"
    return name


def fill_rows(packed: Packed, evaluator: Evaluator, out: Array, chunk_bytes: int = CHUNK_BYTES) -> None:
    """The rows as the graph has them, in the packed element type."""
    if not packed.shape:
        out[...] = evaluator.whole(packed.source)
        return
    step = chunk_rows(packed, chunk_bytes)
    for lo in range(0, packed.shape[0], step):
        hi = min(lo + step, packed.shape[0])
        out[lo:hi] = evaluator.rows(packed.source, lo, hi)


def chunk_rows(packed: Packed, chunk_bytes: int) -> int:
    row_bytes = int(np.prod(packed.shape[1:], dtype=np.int64)) * max(4, packed.dtype.size_bytes)
    return max(1, chunk_bytes // max(1, row_bytes))
