"""Arrays that calibration makes, in files of their own: weights of the graph from then on, mapped and not
held.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from compiler.errors import CompileError
from compiler.quantization.grid import Array
from ir.graph import Weight
from ir.types import DType, Tensor


class Store:
    """A WeightSource (compiler/weights.py) of what was put into it, one file an array, in one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._types: dict[str, Tensor] = {}
        self._maps: dict[str, Array] = {}

    def put(self, name: str, array: Array, dtype: DType) -> Weight:
        """Write an array. Returns the weight that a graph reads it as. Raises CompileError without room."""
        path = self._folder / f"{len(self._types)}.npy"
        raw = array.view(np.uint8) if dtype is DType.F8E4M3 else array  # which numpy's files cannot name
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            np.save(path, raw)
        except OSError as error:
            todo = "Make room there, or set TMPDIR to a folder that has some"
            what = error.strerror or f"no room for {raw.nbytes:,} bytes"  # numpy's own error has no number
            raise CompileError(what, where=str(path), todo=todo) from error
        self._types[name] = Tensor(dtype, array.shape)
        self._maps[name] = np.load(path, mmap_mode="r").view(dtype.numpy)
        return Weight(name, self._types[name])

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._types)

    def type(self, name: str) -> Tensor:
        return self._types[name]

    def rows(self, name: str, lo: int, hi: int) -> Array:
        return self._maps[name][lo:hi]

    def read(self, name: str) -> Array:
        return self._maps[name]
