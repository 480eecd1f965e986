"""The values that a quantised matrix can take, and the scales that fit a group of weights best.

Arrays here lie as [K, N], inputs first: a group of inputs is then a range of rows, and every operation runs
over all N outputs at once. A group's scale is searched for: some shrunken and grown ranges are tried, each is
refined by least squares with its codes held, and the one of least weighted error is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ir.ops.quantize import LARGEST, SYMMETRIC_ZERO, dequantize
from ir.types import DType

Array = np.ndarray[Any, np.dtype[Any]]

FACTORS = (0.65, 0.72, 0.79, 0.86, 0.93, 1.0, 1.07)  # of the range that holds every weight
REFINEMENTS = 2


class UnfitError(ValueError):
    """Weights that no grid can hold; the message says which."""


@dataclass(frozen=True)
class Params:
    """Of one group of inputs, for each output: scale [N], and offset [N] where the grid is asymmetric."""

    scale: Array
    offset: Array | None = None

    def take(self, better: Array, other: Params) -> Params:
        """The other's where `better` [N], else these."""
        scale = np.where(better, other.scale, self.scale)
        if self.offset is None or other.offset is None:
            return Params(scale)
        return Params(scale, np.where(better, other.offset, self.offset))


@dataclass(frozen=True)
class Grid:
    """dtype: u4, i8 or f8e4m3. group: inputs that share a scale, 0 for all. scale: the scales' type."""

    dtype: DType
    group: int = 32
    symmetric: bool = True
    scale: DType = DType.F16

    @property
    def zero(self) -> int:
        """The code of 0 where the grid is symmetric: codes of u4 are stored from 0 on."""
        return SYMMETRIC_ZERO if self.dtype is DType.U4 and self.symmetric else 0

    @property
    def limits(self) -> tuple[float, float]:
        """The least and the largest code, less the zero."""
        if not self.symmetric:
            return 0.0, 15.0
        return (-8.0, 7.0) if self.dtype is DType.U4 else (-LARGEST[self.dtype], LARGEST[self.dtype])

    @property
    def largest(self) -> float:
        """What a weight may be at most, so that scales and offsets are numbers of their type."""
        most = float(ml_dtypes.finfo(self.scale.numpy).max)
        return most * (-self.limits[0] if self.symmetric else 1.0)

    def groups(self, inputs: int) -> list[tuple[int, int]]:
        """First and last row of each group; the last one may be shorter."""
        size = self.group or max(inputs, 1)
        return [(a, min(a + size, inputs)) for a in range(0, inputs, size)]

    def bits_per_weight(self, inputs: int) -> float:
        """Codes and scales, of a matrix of so many inputs."""
        extra = self.scale.bits * (1 if self.symmetric else 2)
        return self.dtype.bits + extra * len(self.groups(inputs)) / max(inputs, 1)

    def codes(self, w: Array, params: Params) -> Array:
        """The nearest steps to w [..., N], less the zero, as floats. A group of scale 0 has codes of 0."""
        low, high = self.limits
        shifted = w if params.offset is None else w - params.offset
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.where(params.scale == 0, 0, np.float32(1) / params.scale).astype(np.float32)
        steps = np.clip(np.nan_to_num(shifted * inverse), low, high)
        if self.dtype is DType.F8E4M3:
            return steps.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        return np.rint(steps)

    def values(self, codes: Array, params: Params) -> Array:
        """What the codes stand for."""
        found = codes * params.scale
        return found if params.offset is None else found + params.offset

    def nearest(self, w: Array, params: Params) -> Array:
        return self.values(self.codes(w, params), params)

    def rounded(self, x: Array) -> Array:
        """A scale or an offset as it is stored, in f32. Raises UnfitError where it is beyond the type."""
        with np.errstate(over="ignore"):
            stored = np.asarray(x, np.float32).astype(self.scale.numpy).astype(np.float32)
        if not np.isfinite(stored).all():
            raise UnfitError(f"weights up to {np.abs(x).max():.1e} need scales beyond {self.scale}")
        return stored

    def plain(self, w: Array) -> Params:
        """The range that just holds every weight of w [g, N], as the op quantize_weight takes it."""
        low, high = self.limits
        if not self.symmetric:
            least, most = w.min(0), w.max(0)
            return Params(self.rounded((most - least) / (high - low)), self.rounded(least))
        largest = np.take_along_axis(w, np.abs(w).argmax(0)[None], 0)[0]
        return Params(self.rounded(largest / low if self.dtype is DType.U4 else np.abs(largest) / high))

    def fit(self, w: Array, importance: Array | None = None) -> Params:
        """The parameters of least error sum(importance * (w - nearest)^2) among those tried, for w [g, N].

        importance: [g], of each input; all alike by default.
        """
        weight = np.ones((len(w), 1), np.float32) if importance is None else importance[:, None]
        best = self.plain(w)
        if self.dtype is DType.F8E4M3:
            return best
        least = self._error(w, best, weight)
        for params in self._candidates(w, best):
            for _ in range(REFINEMENTS):
                params = self._refined(w, params, weight)
            error = self._error(w, params, weight)
            best, least = best.take(error < least, params), np.minimum(error, least)
        return best

    def _candidates(self, w: Array, plain: Params) -> list[Params]:
        """Shrunken and grown; a symmetric u4 grid reaches further on one side, so both signs are tried."""
        if plain.offset is not None:
            middle = plain.offset + plain.scale * (self.limits[1] / 2)
            half = self.limits[1] / 2
            scales = [plain.scale * f for f in FACTORS]
            return [Params(self.rounded(s), self.rounded(middle - s * half)) for s in scales]
        signs = (1, -1) if self.dtype is DType.U4 else (1,)
        return [Params(self.rounded(plain.scale * (f * sign))) for f in FACTORS for sign in signs]

    def _error(self, w: Array, params: Params, weight: Array) -> Array:
        return (weight * np.square(w - self.nearest(w, params))).sum(0)

    def _refined(self, w: Array, params: Params, weight: Array) -> Params:
        """The least squares fit of scale and offset to w with the codes held."""
        q = self.codes(w, params)
        if params.offset is None:
            norm = (weight * q * q).sum(0)
            return Params(self.rounded(_divided((weight * q * w).sum(0), norm, params.scale)))
        total = weight.sum()
        q_mean, w_mean = (weight * q).sum(0) / total, (weight * w).sum(0) / total
        norm = (weight * np.square(q - q_mean)).sum(0)
        scale = _divided((weight * (q - q_mean) * (w - w_mean)).sum(0), norm, params.scale)
        return Params(self.rounded(scale), self.rounded(w_mean - scale * q_mean))


def _divided(a: Array, b: Array, otherwise: Array) -> Array:
    return np.where(b > 0, a / np.where(b > 0, b, 1), otherwise)


@dataclass(frozen=True)
class Quantized:
    """A matrix on a grid: codes [N, K] as they are stored, scale and offset [N, groups]."""

    grid: Grid
    codes: Array
    scale: Array
    offset: Array | None = None

    def values(self) -> Array:
        """The matrix [N, K] that it stands for, in f32."""
        return dequantize(self.codes, self.scale, self.grid.zero, self.offset, self.grid.group)


def stored(grid: Grid, codes: Array, params: list[Params]) -> Quantized:
    """The matrix with codes [K, N], less the zero, and a group's parameters each."""
    scale = np.stack([p.scale for p in params], 1).astype(grid.scale.numpy)
    offsets = [p.offset for p in params if p.offset is not None]
    offset = np.stack(offsets, 1).astype(grid.scale.numpy) if offsets else None
    return Quantized(grid, (codes.T + grid.zero).astype(grid.dtype.numpy, order="C"), scale, offset)


def check_finite(w: Array) -> None:
    """Raises UnfitError where a weight is NaN or infinite."""
    count = int(w.size - np.isfinite(w).sum())
    if count:
        raise UnfitError(f"{count:,} of {w.size:,} weights are NaN or infinite")
