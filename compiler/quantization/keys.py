"""A static shift and scale for each key channel, so that the channels of a token share a scale of codes
well.

Keys have channels that are large for every token. Their mean is taken off, which adds the same number to
all scores of a query and so changes no softmax. What is left is divided by s = sqrt(k / q) with k and q the
root mean squares of key and query in the channel: of all divisions this has the least sum over channels of
q^2 s^2, what the rounding costs in a score, for a given norm of k / s, which the tokens' scales are
proportional to.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np

from compiler.quantization.grid import Array
from compiler.quantization.store import Store
from ir.graph import Op, Value
from ir.ops import RefCall
from ir.types import DType
from passes.paging.formats import KeyGrid

MOST = 16.0  # times the mean of a head's channels that a channel's scale may be, or one over so many times


class KeyStatistics:
    """What a run sees of keys, by the loc of the op that writes them, and of queries."""

    def __init__(self) -> None:
        self._keys: dict[str, tuple[Array, Array]] = {}  # loc -> shift, deviation [G, D]
        self._queries: dict[str, Array] = {}  # loc -> root mean square [G, D]
        self._writer: dict[str, str] = {}  # version of a state -> loc

    def see(self, op: Op, call: RefCall) -> None:
        if op.kind == "kv_write" and op.loc:
            keys = np.asarray(call.args[1], np.float32)  # [T, G, D]
            self._keys[op.loc] = keys.mean(0), keys.std(0)
            self._writer[op.out.name] = op.loc
        elif op.kind == "paged_attention":
            self._see_queries(cast(Value, op.args[1]).name, call.args[0])

    def _see_queries(self, state: str, q: Any) -> None:
        loc = self._writer.get(state)
        if loc is None:
            return
        heads = self._keys[loc][0].shape[0]
        grouped = np.asarray(q, np.float32).reshape(len(q), heads, -1, q.shape[-1])  # [T, G, H / G, D]
        found = np.sqrt(np.square(grouped).mean((0, 2)))
        self._queries[loc] = np.maximum(found, self._queries.get(loc, 0))

    def grids(self, store: Store) -> dict[str, KeyGrid]:
        return {loc: self._grid(loc, store) for loc in self._keys if loc in self._queries}

    def _grid(self, loc: str, store: Store) -> KeyGrid:
        shift, deviation = self._keys[loc]
        scale = key_scale(deviation, self._queries[loc])
        return KeyGrid(
            store.put(f"{loc}.k_inverse", (1 / scale).astype(np.float32), DType.F32),
            store.put(f"{loc}.k_scale", scale, DType.F32),
            store.put(f"{loc}.k_shift", shift.astype(np.float32), DType.F32),
        )


def key_scale(deviation: Array, queries: Array) -> Array:
    """What the channels of a head [G, D] are divided by: by head about 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.sqrt(np.asarray(deviation, np.float64) / queries)
    usable = np.isfinite(ratio) & (ratio > 0)
    logs = np.log2(np.where(usable, ratio, 1))
    middle = logs.mean(-1, keepdims=True)
    bound = np.log2(MOST)
    centred = np.where(usable, np.clip(logs - middle, -bound, bound), 0)
    return np.exp2(centred).astype(np.float32)
