"""compressed-tensors checkpoints: pack-quantized (int4, int8), int-quantized and float-quantized (fp8 e4m3).

weight_packed i32 [N, K*bits/32] of codes plus 2**(bits - 1), or weight i8 or f8e4m3 [N, K]; weight_scale
[N, G], [N, 1], [1] or one for each block [N/bn, K/bk]; weight_zero_point, packed along N where the codes are
packed; weight_g_idx [K] with act-order. What is stored tells which of the configuration's schemes it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compiler.importers.quantized.matrix import CODES, SCALE, Grid, within
from compiler.importers.quantized.order import group_order
from compiler.importers.quantized.packing import WORD_BITS, signed, unpack, unpack_columns
from compiler.importers.quantized.stored import Stored, unread
from compiler.weights import Array
from ir.types import DType
from runtime.errors import shown

PACKED = "weight_packed"
PARTS = (PACKED, "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "dense",
    "mixed-precision",
)
METHOD = "compressed-tensors"


@dataclass(frozen=True)
class Scheme:
    """How some matrices are quantised. block: rows and columns that share a scale; 0: all there are."""

    bits: int
    is_float: bool
    symmetric: bool
    block: tuple[int, int]
    per_tensor: bool = False

    def scale_shapes(self, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        if self.per_tensor:
            return [(), (1,), (1, 1)]
        rows, columns = (-(-n // size) if size else 1 for n, size in zip(shape, self.block, strict=True))
        return [(rows, columns)] if self.block[1] else [(rows, 1), (rows,)]


class Compressed:
    """One matrix. schemes: the configuration's."""

    def __init__(self, stored: Stored, schemes: Sequence[Scheme]) -> None:
        self._stored = stored
        self._packed = stored.has(PACKED)
        self._shape, fits = self._packed_shape(schemes) if self._packed else self._plain_shape(schemes)
        found, scale = stored.scale_shape("weight_scale", (0, 1, 2))
        has_zero = stored.has("weight_zero_point")
        fits = [s for s in fits if found in s.scale_shapes(self._shape)]
        exact = [s for s in fits if s.symmetric != has_zero]  # older files hold zeros of symmetric codes too
        fits = exact or [s for s in fits if s.symmetric]
        if len(set(fits)) != 1:
            raise stored.error(
                f"weight_scale {list(found)} of a matrix {list(self._shape)}"
                f"{' with' if has_zero else ' without'} zero points fits {len(set(fits))} of the schemes in "
                "config.json"
            )
        self._scheme = fits[0]
        self.grid = self._grid(scale)
        if self.grid.zeros is not None:
            self._check_zeros(found)
        self.order = self._order()

    def _packed_shape(self, schemes: Sequence[Scheme]) -> tuple[tuple[int, int], list[Scheme]]:
        stored = self._stored
        rows, words = stored.shape(PACKED, (DType.I32,))
        stored.expect("weight_shape", stored.shape("weight_shape", (DType.I64, DType.I32), (1,)), (2,))
        count, width = (int(n) for n in stored.read("weight_shape"))
        fits = [s for s in schemes if not s.is_float and words == -(-width * s.bits // WORD_BITS)]
        if count != rows or width < 1 or not fits:
            raise stored.error(f"weight_shape is {[count, width]}, and weight_packed {[rows, words]}")
        return (rows, width), fits

    def _plain_shape(self, schemes: Sequence[Scheme]) -> tuple[tuple[int, int], list[Scheme]]:
        rows, columns = self._stored.shape("weight", (DType.I8, DType.F8E4M3))
        is_float = self._stored.source.type(f"{self._stored.module}.weight").dtype is DType.F8E4M3
        return (rows, columns), [s for s in schemes if s.is_float == is_float]

    def _grid(self, scale: DType) -> Grid:
        scheme = self._scheme
        codes = DType.F8E4M3 if scheme.is_float else DType.U4 if scheme.bits == 4 else DType.I8
        zero = 8 if codes is DType.U4 and scheme.symmetric else 0
        size = within(scheme.block[1], self._shape[1])
        return Grid(self._shape, codes, size, scale, zero, None if scheme.symmetric else codes)

    def _check_zeros(self, scale: tuple[int, ...]) -> None:
        stored, part = self._stored, "weight_zero_point"
        if self._zeros_are_packed:
            words = -(-self._shape[0] * self._scheme.bits // WORD_BITS)
            stored.expect(part, stored.shape(part, (DType.I32,)), (words, self.grid.num_groups))
        else:
            stored.expect(part, stored.shape(part, (DType.I8,), (0, 1, 2)), scale)

    @property
    def _zeros_are_packed(self) -> bool:
        return self._packed and not self._scheme.per_tensor

    def _order(self) -> Array | None:
        if not self._stored.has("weight_g_idx"):
            return None
        groups = self._stored.groups("weight_g_idx", self._shape[1], self.grid.num_groups)
        return group_order(groups, self.grid.group_size, self._stored.place)

    def rows(self, part: str, lo: int, hi: int) -> Array:
        if part == CODES:
            codes = self._codes(lo, hi)
            return np.ascontiguousarray(codes if self.order is None else codes[:, self.order])
        if part != SCALE and self._zeros_are_packed:
            bits = self._scheme.bits
            zeros = unpack_columns(self._stored.read("weight_zero_point").T, bits, lo, hi)
            return np.ascontiguousarray(signed(zeros) if bits == 8 else zeros)
        values = self._stored.read("weight_scale" if part == SCALE else "weight_zero_point")
        spread = self._spread(values, lo, hi)
        return spread if part == SCALE else self._shifted(spread)

    def _codes(self, lo: int, hi: int) -> Array:
        if not self._packed:
            return self._shifted(self._stored.read("weight")[lo:hi])
        codes = unpack(self._stored.read(PACKED)[lo:hi], self._scheme.bits, self._shape[1])
        return signed(codes) if self._scheme.bits == 8 else codes

    def _shifted(self, codes: Array) -> Array:
        """Codes of 4 bits that are stored as -8..7, as 0..15."""
        if self.grid.codes is not DType.U4:
            return codes
        found = codes + np.int8(8)
        if found.min(initial=0) < 0 or found.max(initial=0) > 15:
            raise self._stored.error("it holds codes outside of -8..7, which 4 bits do not hold")
        return found.view(np.uint8)

    def _spread(self, values: Array, lo: int, hi: int) -> Array:
        """What each row of lo..hi has for each group."""
        if self._scheme.per_tensor:
            return np.full((hi - lo, 1), values.reshape(-1)[0])
        rows = np.arange(lo, hi) // min(max(self._scheme.block[0], 1), self._shape[0])
        return values.reshape(len(values), -1)[rows]


def settings(config: dict[str, Any], where: str) -> list[Scheme]:
    """The schemes of a configuration. Raises ImportRefused on a format or scheme that is not read."""
    groups, sparsity = config.get("config_groups"), config.get("sparsity_config")
    groups = list(groups.values()) if isinstance(groups, dict) else []
    if not groups or not all(isinstance(g, dict) for g in groups):
        raise unread(METHOD, "it has no config_groups of schemes", where)
    for form in (config.get("format"), *(g.get("format") for g in groups)):
        if form is not None and form not in FORMATS:
            what = f"its format is {shown(form)}; {', '.join(FORMATS[:4])} are read"
            raise unread(METHOD, what, where)
    if sparsity and not (isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"):
        raise unread(METHOD, "its weights are sparse", where)
    return [_scheme(g["weights"], where) for g in groups if g.get("weights") is not None]


def _scheme(weights: Any, where: str) -> Scheme:
    if not isinstance(weights, dict):
        raise unread(METHOD, f"weights are {shown(weights)}", where)
    bits, kind, size = weights.get("num_bits", 8), weights.get("type", "int"), weights.get("group_size")
    if (kind, bits) not in (("int", 4), ("int", 8), ("float", 8)):
        what = f"weights are {shown(kind)} of {shown(bits)} bits; int of 4 and 8 and float of 8 are read"
        raise unread(METHOD, what, where)
    strategy = weights.get("strategy") or ("group" if size else "tensor")
    blocks = {
        "tensor": (0, 0),
        "channel": (1, 0),
        "group": (1, size),
        "block": weights.get("block_structure"),
    }
    block = blocks.get(str(strategy))
    if (
        not isinstance(block, tuple | list)
        or len(block) != 2
        or not all(type(n) is int and n >= 0 for n in block)
    ):
        what = f"weights have the strategy {shown(strategy)} with {shown(size)} and {shown(block)}"
        raise unread(METHOD, what, where)
    symmetric = weights.get("symmetric", True) is not False
    return Scheme(
        bits, kind == "float", symmetric or kind == "float", (block[0], block[1]), strategy == "tensor"
    )
