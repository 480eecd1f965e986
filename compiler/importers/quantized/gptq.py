"""GPTQ checkpoints: codes packed along K, as AutoGPTQ and GPTQModel write them.

qweight i32 [K*bits/32, N], qzeros i32 [G, N*bits/32], scales [G, N], g_idx [K]: the group of each column.
Checkpoints of the first version (`checkpoint_format` gptq) hold each zero less one, modulo 2**bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from compiler.importers.quantized.matrix import CODES, SCALE, Grid, within
from compiler.importers.quantized.order import group_order
from compiler.importers.quantized.packing import WORD_BITS, signed, unpack, unpack_columns
from compiler.importers.quantized.stored import ORIGINAL, Stored, same_everywhere, unread
from compiler.weights import Array
from ir.types import DType
from runtime.errors import shown

PARTS = ("qweight", "qzeros", "scales", "g_idx")
BITS = (2, 3, 4, 8)
FORMATS = {"gptq": 1, "gptq_v2": 0}  # what is added to a stored zero


class Gptq:
    """One matrix. group_sizes: those that the configuration has."""

    def __init__(self, stored: Stored, group_sizes: Iterable[int], added: int) -> None:
        self._stored, self._added = stored, added
        words, size = stored.shape("qweight", (DType.I32,))
        shape, self._scale = stored.scale_shape("scales")
        stored.expect("scales", shape, (shape[0], size))
        zeros = stored.shape("qzeros", (DType.I32,))
        self.bits = zeros[1] * WORD_BITS // size
        if self.bits not in BITS or self.bits * size != zeros[1] * WORD_BITS:
            raise stored.error(
                f"qzeros has the shape {list(zeros)}, which is none of {BITS} bits for {size} rows"
            )
        stored.expect("qzeros", zeros, (shape[0], zeros[1]))
        width = words * WORD_BITS // self.bits
        self._shape, self._num_groups = (size, width), shape[0]
        self._group_size = self._find_group_size(sorted(set(group_sizes)), width)
        groups = stored.groups("g_idx", width, shape[0]) if stored.has("g_idx") else None
        self.order = None if groups is None else group_order(groups, self._group_size, stored.place)
        self.grid = self._grid()

    def _find_group_size(self, sizes: list[int], width: int) -> int:
        fits = [n for n in sizes if (-(-width // n) if n > 0 else 1) == self._num_groups]
        if len(fits) != 1:
            what = f"{self._num_groups} groups of {width} columns are not those of group_size {sizes}"
            raise self._stored.error(what)
        return within(max(fits[0], 0), width)

    def _grid(self) -> Grid:
        centre = 128 if self.bits == 8 else 0
        codes = DType.I8 if centre else DType.U4
        same = same_everywhere(self._stored.read("qzeros"), self.bits)
        if same is None:
            return Grid(self._shape, codes, self._group_size, self._scale, zeros=codes)
        zero = (same + self._added) % (1 << self.bits)
        return Grid(self._shape, codes, self._group_size, self._scale, zero - centre)

    def rows(self, part: str, lo: int, hi: int) -> Array:
        if part == CODES:
            codes = unpack(self._stored.read("qweight")[:, lo:hi].T, self.bits, self._shape[1])
            codes = codes if self.order is None else codes[:, self.order]
            return self._typed(codes)
        if part == SCALE:
            return np.ascontiguousarray(self._stored.read("scales")[:, lo:hi].T)
        zeros = unpack_columns(self._stored.read("qzeros"), self.bits, lo, hi)
        return self._typed((zeros + np.uint8(self._added)) & np.uint8((1 << self.bits) - 1))

    def _typed(self, codes: Array) -> Array:
        codes = np.ascontiguousarray(codes)
        return signed(codes) if self.bits == 8 else codes


def settings(config: dict[str, Any], where: str) -> tuple[list[int], int]:
    """(the sizes of groups, what is added to a stored zero). Raises ImportRefused on another format."""
    form = config.get("checkpoint_format", config.get("format", "gptq"))
    if not isinstance(form, str) or form not in FORMATS or config.get("is_marlin_format"):
        todo = f"Save it in the format gptq, or c{ORIGINAL[1:]}"
        raise unread("gptq", f"its format is {shown(form)}; {', '.join(FORMATS)} are read", where, todo)
    rules = config.get("dynamic")
    others = [r for r in rules.values() if isinstance(r, dict)] if isinstance(rules, dict) else []
    sizes = [each["group_size"] for each in (config, *others) if "group_size" in each]
    if not sizes or not all(type(n) is int and (n > 0 or n == -1) for n in sizes):
        raise unread("gptq", f"its group_size is {shown(sizes)}", where)
    return sizes, FORMATS[form]
