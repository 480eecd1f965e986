"""What tests of experts' linears share: which experts tokens choose, and results by numpy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ir.build import GraphBuilder
from ir.dims import symbol
from ir.graph import Value
from ir.types import DType
from tests.codegen.harness import arg, weight

Array = np.ndarray[Any, np.dtype[Any]]
VOCAB = 48


def source(b: GraphBuilder, name: str, *shape: int, dtype: str = "f32") -> Value:
    """Rows [T, *shape] of the table NAME.x, chosen by the token's id."""
    x = b.op("embed", arg(b, "ids"), weight(f"{name}.x", VOCAB, int(np.prod(shape))))
    x = b.op("cast", x, dtype=dtype) if dtype != "f32" else x
    return x if len(shape) == 1 else b.op("reshape", x, shape=(symbol("T"), *shape))


def chosen(b: GraphBuilder, name: str, k: int) -> Value:
    """Each token's row of the table NAME.experts."""
    return b.op("take", weight(f"{name}.experts", VOCAB, k, dtype=DType.I32), arg(b, "ids"), axis=0)


def draw_experts(count: int, k: int, choice: str, rng: np.random.Generator) -> Array:
    """A table [VOCAB, k]. choice: "any" k different ones, "same" for all tokens, or "few" of all."""
    among = min(count, k + 1) if choice == "few" else count
    found = np.stack([rng.permutation(among)[:k] for _ in range(VOCAB)]).astype(np.int32)
    return np.broadcast_to(found[:1], found.shape).copy() if choice == "same" else found


def per_slot(experts: Array, x: Array, width: int, linear: Callable[[int, Array], Array]) -> Array:
    """[T, k, width]: of each token and slot the linear(expert, rows) of its row, x [T, K] or [T, k, K]."""
    out = np.full((*experts.shape, width), np.nan)
    rows = x if x.ndim == 3 else np.broadcast_to(x[:, None], (*experts.shape, x.shape[-1]))
    for t, j in np.ndindex(*experts.shape):
        out[t, j] = linear(int(experts[t, j]), rows[t, j][None])[0]
    return out
