"""Results kept from run to run: an op on what it was given before gives what it gave before.

What an op computes is told by its kind, its attributes with sizes filled in, its operands, and the types of
its results. A value is known by a digest of its contents, so that work stops where a rewrite changes no bit;
one too large to read for that, by the op that made it; a weight by its name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, cast

import numpy as np
import sympy

Key = Hashable
Results = tuple[tuple[Any, Key], ...]


class Reuse:
    """The results of the last two rounds of runs. All runs must read the same weights."""

    LIMIT_BYTES = 2 << 30  # of a round's results; what is beyond is computed again
    LARGE_BYTES = 16 << 20  # a larger result is not kept
    READ_BYTES = 1 << 20  # a larger result is not read for a digest

    def __init__(self) -> None:
        self._last, self._now, self._bytes = dict[Key, Results](), dict[Key, Results](), 0
        self._made = dict[Key, int]()

    def next_round(self) -> None:
        """Forget what was not used since the last call."""
        self._last, self._now, self._bytes = self._now, {}, 0

    def results(self, call: Key, compute: Callable[[], Sequence[Any]]) -> Results:
        """The results of the op that `call` tells all of, with a key each, computed unless they are kept."""
        found = self._now.get(call)
        if found is None:
            found = self._last.get(call) or self._keyed(call, compute())
            self._keep(call, found)
        return found

    def _keyed(self, call: Key, results: Sequence[Any]) -> Results:
        made = self._made.setdefault(call, len(self._made))
        return tuple(
            (result, key_of(result) if _num_bytes(result) <= self.READ_BYTES else (made, index))
            for index, result in enumerate(results)
        )

    def _keep(self, call: Key, results: Results) -> None:
        sizes = [_num_bytes(result) for result, _ in results]
        if max(sizes, default=0) <= self.LARGE_BYTES and self._bytes + sum(sizes) <= self.LIMIT_BYTES:
            self._now[call], self._bytes = results, self._bytes + sum(sizes)


def key_of(given: Any) -> Key:
    """An array, or a state of arrays by stream, by its contents."""
    if isinstance(given, dict):
        arrays = cast("dict[str, Any]", given)
        return tuple((name, key_of(array)) for name, array in arrays.items())
    array = np.asarray(given)
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return str(array.dtype), array.shape, hashlib.blake2b(content.data, digest_size=32).digest()


def exact(attr: Any) -> Key:
    """An attribute that equals only its like: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(attr, tuple):
        return tuple(exact(item) for item in cast("tuple[Any, ...]", attr))
    return attr if isinstance(attr, sympy.Basic) else (type(attr).__name__, repr(attr))


def _num_bytes(given: Any) -> int:
    if isinstance(given, dict):
        return sum(map(_num_bytes, cast("dict[str, Any]", given).values()))
    return given.nbytes
