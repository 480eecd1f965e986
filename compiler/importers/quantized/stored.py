"""The arrays that a quantised matrix is stored as, checked before they are used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from compiler.importers.refused import ImportRefused
from compiler.weights import Array, WeightError, WeightSource
from ir.dims import evaluate
from ir.types import DType
from runtime.errors import shown

ORIGINAL = "Compile the checkpoint that it was made from"
AGAIN = "Download the checkpoint again, or compile the one that it was made from"
_SCALES = (DType.F16, DType.BF16, DType.F32)


@dataclass(frozen=True)
class Stored:
    """The arrays of one module, by the part of their name after the module's path. where: the checkpoint."""

    source: WeightSource
    names: frozenset[str]
    module: str
    where: str

    @property
    def place(self) -> str:
        return f"{self.where}, tensors of {shown(self.module)}"

    def has(self, part: str) -> bool:
        return f"{self.module}.{part}" in self.names

    def shape(self, part: str, dtypes: Iterable[DType], num_axes: Iterable[int] = (2,)) -> tuple[int, ...]:
        """Raises WeightError where it is missing, or of another type or number of axes."""
        if not self.has(part):
            raise self.error(f"{part} is missing, without which its codes mean nothing")
        found = self.source.type(f"{self.module}.{part}")
        if found.dtype not in (allowed := tuple(dtypes)):
            raise self.error(f"{part} is of {found.dtype}, not of {' or '.join(allowed)}")
        if found.rank not in tuple(num_axes) or 0 in found.shape:
            raise self.error(f"{part} has the shape {list(found.shape)}")
        return tuple(evaluate(n, {}) for n in found.shape)

    def scale_shape(self, part: str, num_axes: Iterable[int] = (2,)) -> tuple[tuple[int, ...], DType]:
        shape = self.shape(part, _SCALES, num_axes)
        return shape, self.source.type(f"{self.module}.{part}").dtype

    def expect(self, part: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if found != wanted:
            raise self.error(f"{part} has the shape {list(found)}, where the others make it {list(wanted)}")

    def read(self, part: str) -> Array:
        return self.source.read(f"{self.module}.{part}")

    def groups(self, part: str, size: int, num_groups: int) -> Array:
        """The group of each of `size` columns."""
        self.expect(part, self.shape(part, (DType.I32, DType.I64), (1,)), (size,))
        found = self.read(part).astype(np.int64)
        if found.min() < 0 or found.max() >= num_groups:
            raise self.error(f"{part} names groups {found.min()}..{found.max()} of {num_groups}")
        return found

    def error(self, what: str, todo: str = AGAIN) -> WeightError:
        return WeightError(what, where=self.place, todo=todo)


def same_everywhere(words: Array, bits: int) -> int | None:
    """The code that all words [.., ..] hold in each of their places; None where there are several."""
    first = int(words.flat[0]) & 0xFFFFFFFF
    code = first & ((1 << bits) - 1)
    if 32 % bits or first != sum(code << at for at in range(0, 32, bits)):
        return None
    return code if bool((words == words.flat[0]).all()) else None


def unread(method: str, what: str, where: str, todo: str = ORIGINAL) -> ImportRefused:
    """The refusal of a way of quantising. where: the config.json."""
    return ImportRefused(f"the checkpoint is quantised ({method}): {what}", where=where, todo=todo)
