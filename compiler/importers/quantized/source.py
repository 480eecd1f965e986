"""Arrays of a checkpoint, quantised matrices among them: as floats under the weight's name, or in parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import numpy as np

from compiler.importers.quantized.matrix import Matrix, float_rows
from compiler.weights import Array, WeightError, WeightSource
from ir.types import DType, Tensor

CHUNK_ROWS = 256


@runtime_checkable
class QuantizedSource(WeightSource, Protocol):
    """A source that knows which of its arrays are quantised."""

    def matrix(self, name: str) -> Matrix | None:
        """Of a stack [E,N,K] all rows as one. Raises Unlike where these are on several grids."""
        ...


class MatrixSource:
    """Quantised matrices as f32 under their weights' names, and the other arrays of a source."""

    def __init__(self, source: WeightSource, matrices: Mapping[str, Matrix], hidden: frozenset[str]) -> None:
        """hidden: arrays of the source that matrices are made of."""
        self._source, self._matrices = source, dict(matrices)
        self._names = (*(n for n in source.names if n not in hidden and n not in matrices), *matrices)

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def matrix(self, name: str) -> Matrix | None:
        return self._matrices.get(name)

    def type(self, name: str) -> Tensor:
        matrix = self.matrix(name)
        return self._source.type(name) if matrix is None else Tensor(DType.F32, matrix.grid.shape)

    def rows(self, name: str, lo: int, hi: int) -> Array:
        matrix = self.matrix(name)
        return self._source.rows(name, lo, hi) if matrix is None else float_rows(matrix, lo, hi)

    def read(self, name: str) -> Array:
        matrix = self.matrix(name)
        if matrix is None:
            return self._source.read(name)
        found = np.empty(matrix.grid.shape, np.float32)
        for lo in range(0, len(found), CHUNK_ROWS):
            found[lo : lo + CHUNK_ROWS] = float_rows(matrix, lo, min(lo + CHUNK_ROWS, len(found)))
        return found


class PartSource:
    """Parts of matrices, each by the weight's name, a dot and its own: `lm_head.weight.scale`."""

    def __init__(self, matrices: Mapping[str, Matrix]) -> None:
        self._parts = {
            f"{name}.{part}": (matrix, part, kind)
            for name, matrix in matrices.items()
            for part, kind in matrix.grid.parts()
        }

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._parts)

    def type(self, name: str) -> Tensor:
        return self._find(name)[2]

    def rows(self, name: str, lo: int, hi: int) -> Array:
        matrix, part, _ = self._find(name)
        return matrix.rows(part, lo, hi)

    def read(self, name: str) -> Array:
        matrix, part, _ = self._find(name)
        return matrix.rows(part, 0, matrix.grid.shape[0])

    def _find(self, name: str) -> tuple[Matrix, str, Tensor]:
        if name not in self._parts:
            raise WeightError(f"there is no part {name!r}", where="quantised weights")
        return self._parts[name]
