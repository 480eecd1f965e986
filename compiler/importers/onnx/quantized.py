"""Converters of onnxruntime's quantised products and embeddings: codes of 4 or 8 bits in blocks of rows.

w[n, k] = (codes[n, k] - zero[n, g]) * scale[n, g], g = k // block_size. Codes of 4 bits are two in a byte,
the first in the lower half; without zero points all are 8, and 128 of 8 bits. The graph gets a weight that is
such a matrix: as floats, or, where its own grid is kept, as what it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from compiler.importers.onnx.context import Context, Convert, Held
from compiler.importers.onnx.gather import rows
from compiler.importers.quantized.matrix import CODES, SCALE, Grid, within
from compiler.importers.quantized.packing import signed
from compiler.importers.refused import ImportRefused
from compiler.weights import Array
from ir.graph import Weight
from ir.types import DType, Tensor

Read = Callable[[], Array]
_SCALES = (DType.F32, DType.F16, DType.BF16)


@dataclass(frozen=True)
class BlockMatrix:
    """codes: uint8 [N, bytes of a row]. scale and zeros: [N, G], zeros None where all are the same; those of
    4 bits are packed as codes are."""

    grid: Grid
    codes: Read
    scale: Read
    zeros: Read | None
    bits: int
    order: Array | None = None

    def rows(self, part: str, lo: int, hi: int) -> Array:
        if part == SCALE:
            return self.scale()[lo:hi]
        packed = self.codes() if part == CODES else self.zeros()  # type: ignore[misc]
        width = self.grid.shape[1] if part == CODES else self.grid.num_groups
        found = _unpacked(np.asarray(packed[lo:hi]), self.bits, width)
        return signed(found) if self.bits == 8 else found


def _unpacked(packed: Array, bits: int, width: int) -> Array:
    """One code in each byte, [R, width]."""
    if bits == 8:
        return np.ascontiguousarray(packed[:, :width])
    halves = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], -1)
    return np.ascontiguousarray(halves.reshape(len(packed), -1)[:, :width])


def _matmul(
    c: Context,
    x: Held,
    codes: Held,
    scales: Held,
    zeros: Held | None = None,
    groups: Held | None = None,
    bias: Held | None = None,
    *,
    K: int,
    N: int,
    bits: int = 4,
    block_size: int,
    accuracy_level: int = 0,
    **_: Any,
) -> Any:
    """x @ w.T + bias. accuracy_level lets a runtime round x to 8 bits; here it stays as it is."""
    if groups is not None:
        raise ImportRefused("g_idx, columns in another order than their groups, is not read")
    w = matrix(c, (N, K), bits, block_size, codes, scales, zeros)
    return c.op("linear", c.tensor(x), w, None if bias is None else c.tensor(bias, DType.F32))


def _gather(
    c: Context,
    codes: Held,
    ids: Held,
    scales: Held,
    zeros: Held | None = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = -1,
) -> Any:
    shape: Any = c.shape(codes)
    if len(shape) != 2 or gather_axis != 0 or quantize_axis not in (1, -1) or c.dtype(codes) is not DType.U8:
        raise ImportRefused(f"of {c.dtype(codes)}{list(shape)}, or along other axes, it is not read")
    size = (shape[0], shape[1] * 8 // bits)
    return rows(c, matrix(c, size, bits, block_size, codes, scales, zeros), ids, 0)


def matrix(
    c: Context, shape: tuple[int, int], bits: int, block: int, codes: Held, scales: Held, zeros: Held | None
) -> Weight:
    """The weight that a quantised matrix is; its parts must be arrays of the file."""
    if bits not in (4, 8):
        raise ImportRefused(f"codes of {bits} bits are not read; those of 4 and 8 are")
    names = [_stored(c, x) for x in (codes, scales, zeros)]
    count = -(-shape[1] // block)
    parts = [
        _part(c, names[0], "codes", (DType.U8,), shape[0], count * block * bits // 8, shape[1] * bits // 8),
        _part(c, names[1], "scales", _SCALES, shape[0], count, count),
        _part(c, names[2], "zero points", (DType.U8,), shape[0], -(-count * bits // 8), 0),
    ]
    scale = c.shared.stored[str(names[1])].type.dtype
    grid = Grid(
        shape,
        DType.U4 if bits == 4 else DType.I8,
        within(block, shape[1]),
        scale,
        8 if bits == 4 and parts[2] is None else 0,
        None if parts[2] is None else DType.U4 if bits == 4 else DType.I8,
    )
    name = re.sub(r"_Q[48]G?$|$", ".w", str(names[0]), count=1)  # beside the codes' own name
    found = BlockMatrix(grid, parts[0], parts[1], parts[2], bits)  # type: ignore[arg-type]
    known = c.shared.matrices.setdefault(name, found)
    if known.grid != grid:
        raise ImportRefused(f"@{name} is read as {known.grid} and as {grid}")
    return Weight(name, Tensor(DType.F32, shape))


def _stored(c: Context, x: Held | None) -> str | None:
    """The array of the file that an operand is, whatever its shape."""
    while x is not None and (made := c.maker(x)) is not None and made.kind == "reshape":
        x = made.args[0]
    if x is not None and not isinstance(x, Weight):
        raise ImportRefused("codes, scales and zero points must be arrays of the file")
    return None if x is None else x.name


def _part(
    c: Context, name: str | None, what: str, dtypes: Any, count: int, width: int, least: int
) -> Read | None:
    """How a part is read as [count, width]; rows may end with their last element (`least`)."""
    if name is None:
        return None
    kind = c.shared.stored[name].type
    total = int(np.prod([int(n) for n in kind.shape]))
    if kind.dtype not in dtypes or total not in (count * width, count * (least or width)):
        raise ImportRefused(f"its {what} @{name} are {kind.dtype}{list(kind.shape)}, not [{count},{width}]")
    return lambda: np.asarray(c.shared.read(name)).reshape(count, total // count)


TABLE: dict[str, Convert] = {
    "com.microsoft.MatMulNBits": _matmul,
    "com.microsoft.GatherBlockQuantized": _gather,
}
