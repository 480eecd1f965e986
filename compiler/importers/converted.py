"""Arrays that a checkpoint does not hold as the model has them, computed from it when they are asked for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compiler.importers.arrangement import Arrangement, Rows, row_parts, whole
from compiler.importers.conversions import arrange
from compiler.importers.stored_names import StoredNames
from compiler.weights import BELONG, Array, WeightError, WeightSource
from ir.types import Tensor


class ConvertedSource:
    """The converted arrays of `stored` under the model's own names. source: what is stored.

    Rows are made of no more than what they need: of a stack of experts, of those experts alone. Raises
    ImportRefused or WeightError when an array is asked for that cannot be computed.
    """

    def __init__(self, source: WeightSource, stored: StoredNames, model: Any, where: str) -> None:
        """where: the checkpoint."""
        self._source, self._stored, self._config, self._where = source, stored, model.config, where
        self._shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(tensor.shape) for name, tensor in model.state_dict().items()
        }
        self._made: dict[str, Arrangement] = {}
        # The last expert that was read: its rows are packed some at a time.
        self._last: tuple[tuple[str, int, int], Array] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._stored.converted)

    def type(self, name: str) -> Tensor:
        found = self._find(name)
        return Tensor(found.dtype, found.shape)

    def rows(self, name: str, lo: int, hi: int) -> Array:
        if self._last is not None and self._last[0] == (name, lo, hi):
            return self._last[1]
        array = self._find(name)
        first, last, _ = slice(lo, hi).indices(array.shape[0])
        found = array.read(((first, max(first, last)), *whole(array)[1:]))
        self._last = ((name, lo, hi), found) if last - first == 1 and found.ndim > 2 else None
        return found

    def read(self, name: str) -> Array:
        found = self._find(name)
        return found.read(whole(found))

    def row_parts(self, name: str) -> list[Rows] | None:
        """Its rows, [.., K] as a matrix, as rows of stored ones in order; None where they are not whole."""
        return row_parts(self._find(name))

    def _find(self, name: str) -> Arrangement:
        if name not in self._made:
            conversion = self._stored.converted.get(name)
            if conversion is None:
                raise WeightError(f"there is no tensor {name!r}", where=self._where, todo=BELONG)
            self._made.update(arrange(conversion, self._source, self._shapes, self._config, self._where))
        if name not in self._made:
            what = f"{name!r} has to be computed from it, in a way that is not known here"
            place = f"{self._where}, tensor {self._stored.converted[name].sources[0].name!r}"
            raise WeightError(what, where=place, todo=BELONG)
        return self._made[name]
