"""AWQ checkpoints of the version "gemm": 4-bit codes packed along N, in an order of their own.

qweight i32 [K, N/8], qzeros i32 [G, N/8], scales [G, N]. The codes of 8 columns are in a word in the
order 0, 2, 4, 6, 1, 3, 5, 7, lowest bits first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from compiler.importers.quantized.matrix import CODES, SCALE, Grid, within
from compiler.importers.quantized.packing import unpack
from compiler.importers.quantized.stored import ORIGINAL, Stored, same_everywhere, unread
from compiler.weights import Array
from ir.types import DType
from runtime.errors import shown

PARTS = ("qweight", "qzeros", "scales")
BITS, PER_WORD = 4, 8
_PLACES = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # where in a word each of its 8 columns is


class Awq:
    """One matrix. group_size: 0 for all of K."""

    order: Array | None = None

    def __init__(self, stored: Stored, group_size: int) -> None:
        self._stored = stored
        width, words = stored.shape("qweight", (DType.I32,))
        self._shape = (words * PER_WORD, width)
        shape, self._scale = stored.scale_shape("scales")
        self._group_size = within(group_size, width)
        num_groups = -(-width // group_size) if group_size else 1
        stored.expect("scales", shape, (num_groups, self._shape[0]))
        stored.expect("qzeros", stored.shape("qzeros", (DType.I32,)), (num_groups, words))
        same = same_everywhere(stored.read("qzeros"), BITS)
        zero, zeros = (same, None) if same is not None else (0, DType.U4)
        self.grid = Grid(self._shape, DType.U4, self._group_size, self._scale, zero, zeros)

    def rows(self, part: str, lo: int, hi: int) -> Array:
        if part == SCALE:
            return np.ascontiguousarray(self._stored.read("scales")[:, lo:hi].T)
        words = self._stored.read("qweight" if part == CODES else "qzeros")
        first, last = lo // PER_WORD, -(-hi // PER_WORD)
        codes = unpack(words[:, first:last], BITS, (last - first) * PER_WORD)
        codes = codes.reshape(len(codes), -1, PER_WORD)[..., _PLACES].reshape(len(codes), -1)
        return np.ascontiguousarray(codes[:, lo - first * PER_WORD : hi - first * PER_WORD].T)


def settings(config: dict[str, Any], where: str) -> int:
    """The size of groups. Raises ImportRefused on another version."""
    version = config.get("version", config.get("checkpoint_format", config.get("format", "gemm")))
    if str(version).lower() != "gemm":
        todo = f"Save it in the version gemm, or c{ORIGINAL[1:]}"
        raise unread("awq", f"its version is {shown(version)}; gemm is read", where, todo)
    bits = config.get("bits", config.get("w_bit", BITS))
    size = config.get("group_size", config.get("q_group_size"))
    if bits != BITS or type(size) is not int or not (size > 0 or size == -1):
        what = f"it has {shown(bits)} bits and group_size {shown(size)}; {BITS} bits are read"
        raise unread("awq", what, where)
    return max(size, 0)
