"""Quantised matrices as the C++ kernels read them: include/quant.h describes the layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from codegen.errors import PackError
from ir.graph import Value, Weight, tensor_of
from ir.types import DType

Array = np.ndarray[Any, np.dtype[Any]]

LANES = 16  # outputs side by side in a panel: W in vec.h
DEPTH = 32  # elements of K that a panel is filled up to: BLOCK in quant.h
ALIGNMENT = 64  # of a panel's codes
SHIFT = 128  # codes of u8 are kept as i8, less this
CODES = {DType.U4: "U4", DType.I8: "I8", DType.U8: "I8", DType.F8E4M3: "F8"}


@dataclass(frozen=True)
class Matrix:
    """The operands and attributes that are a matrix. zero: of every code, where `zeros` is None."""

    codes: Weight | Value
    scales: Weight | Value
    zeros: Weight | Value | None
    offsets: Weight | Value | None
    group_size: int
    zero: int

    @property
    def parts(self) -> tuple[Weight | Value | None, ...]:
        return self.codes, self.scales, self.zeros, self.offsets

    @property
    def dtype(self) -> DType:
        return tensor_of(self.codes).dtype

    @property
    def shape(self) -> tuple[int, int]:
        n, k = (int(d) for d in tensor_of(self.codes).shape)
        return n, k

    @property
    def groups(self) -> int:
        return -(-self.shape[1] // self.group_size) if self.group_size else 1

    @property
    def kept_zero(self) -> int:
        """Of every code as it is kept."""
        return 0 if self.zeros is not None else self.zero - self.shift

    @property
    def shift(self) -> int:
        return SHIFT if self.dtype is DType.U8 else 0

    @property
    def panel_bytes(self) -> int:
        return self._codes_at + self._code_bytes

    @property
    def _code_bytes(self) -> int:
        return -(-self.shape[1] // DEPTH) * DEPTH * LANES * self.dtype.bits // 8

    @property
    def _codes_at(self) -> int:
        per_group = sum(np.dtype(t.numpy).itemsize for t in self.kinds if t is not None)
        return -(-self.groups * LANES * per_group // ALIGNMENT) * ALIGNMENT

    @property
    def kinds(self) -> tuple[DType, DType | None, DType | None]:
        """Types of scales, zeros and offsets as they are kept."""
        return (
            kept_float(tensor_of(self.scales).dtype),
            None if self.zeros is None else DType.I8,
            None if self.offsets is None else kept_float(tensor_of(self.offsets).dtype),
        )

    def pack(self, name: str, parts: tuple[Array | None, ...], out: Array) -> None:
        """Rows of codes, scales, zeros and offsets into panels, out [rows / 16, panel_bytes].

        Raises PackError with the matrix's name where one is no finite number.
        """
        codes, *numbers = parts
        assert codes is not None
        at = 0
        for values, kind in zip(numbers, self.kinds, strict=True):
            if values is not None and kind is not None:
                kept = self._kept(name, values, kind)
                lanes = _in_panels(kept, len(out)).swapaxes(1, 2).reshape(len(out), -1)
                raw = np.ascontiguousarray(lanes).view(np.uint8)
                out[:, at : at + raw.shape[1]] = raw
                at += raw.shape[1]
        out[:, at : self._codes_at] = 0
        out[:, self._codes_at :] = self._quads(name, codes, len(out))

    def _kept(self, name: str, values: Array, kind: DType) -> Array:
        if kind is DType.I8:
            shifted = values.astype(np.int32) - self.shift
            if shifted.min(initial=0) < -128 or shifted.max(initial=0) > 127:
                raise PackError("a zero is no code", name)
            return shifted.astype(np.int8)
        if not np.isfinite(values.astype(np.float32)).all():
            raise PackError("a scale or an offset is not finite", name)
        return values.astype(kind.numpy)

    def _quads(self, name: str, codes: Array, panels: int) -> Array:
        """[panels, bytes]: elements of K by four, as include/quant.h says."""
        if self.dtype is DType.F8E4M3 and np.isnan(codes.astype(np.float32)).any():
            raise PackError("a code is not a number", name)
        raw = np.ascontiguousarray(codes.astype(self.dtype.numpy, copy=False)).view(np.uint8)
        raw = raw ^ np.uint8(SHIFT) if self.shift else raw
        filled = np.pad(raw, ((0, 0), (0, -raw.shape[1] % DEPTH)))
        quads = _in_panels(filled, panels).reshape(panels, LANES, -1, 4).swapaxes(1, 2)
        if self.dtype is DType.U4:
            quads = quads[:, 0::2] | quads[:, 1::2] << np.uint8(4)
        return quads.reshape(panels, -1)


def _in_panels(rows: Array, panels: int) -> Array:
    """[N, width] as [panels, 16, width], filled up with zeros."""
    missing = panels * LANES - len(rows)
    filled = np.pad(rows, ((0, missing), (0, 0))) if missing else rows
    return filled.reshape(panels, LANES, rows.shape[1])


def kept_float(dtype: DType) -> DType:
    return DType.F16 if dtype is DType.F16 else DType.F32
