"""Linear recurrences that all targets are tested with: graphs, weights, and the definition in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ir.graph import Graph
from ir.ops.recurrence import recurrence_streams
from ir.types import KV, DType
from tests.codegen import test_attention as shared
from tests.codegen.harness import Array, Chunk, arg, paged_builder, weight

VOCAB, BLOCKS, LAYERS, LAYER = 50, 12, 3, 1
RTOL, ATOL = 2e-4, 2e-5
CHUNKS = (
    [1, 1, 15, 16, 17, 1],
    [17, 16, 15, 3],
    [16, 16, 16, 3],
    [33, 1, 17],
    [15, 1, 1, 31, 3],
    [50, 1],
)  # of 51 tokens


@dataclass(frozen=True)
class Case:
    """decay: its size for each head."""

    heads: int
    groups: int
    keys: int
    values: int
    decay: int = 1
    beta: bool = False
    rates: bool = False
    block: int = 16
    dtype: DType = DType.F32

    @property
    def kv(self) -> KV:
        key, value = (self.groups, self.keys), (self.heads, self.values)
        return KV(recurrence_streams(key, value, self.decay, self.beta), LAYERS, self.block, state=True)

    @cached_property
    def shapes(self) -> dict[str, tuple[int, int]]:
        found = {"q": (self.groups, self.keys), "k": (self.groups, self.keys)}
        found |= {"v": (self.heads, self.values), "decay": (self.heads, self.decay)}
        return found | ({"beta": (self.heads, 1)} if self.beta else {})


CASES = {
    "gated_delta": Case(4, 2, 17, 67, beta=True),
    "delta_of_channels": Case(3, 3, 5, 16, decay=5, beta=True),
    "channels": Case(2, 1, 15, 8, decay=15),
    "grouped": Case(6, 2, 16, 15),
    "rates": Case(1, 1, 7, 131, decay=131, rates=True),
    "rates_and_beta": Case(2, 1, 4, 5, decay=5, beta=True, rates=True),
    "smallest": Case(1, 1, 1, 1),
    "long_keys": Case(1, 1, 131, 33, beta=True),
    "small_blocks": Case(2, 2, 8, 9, block=8, beta=True),
    "large_blocks": Case(2, 1, 8, 9, block=32),
    "bf16": Case(2, 1, 13, 17, beta=True, dtype=DType.BF16),
}


def graph(case: Case) -> Graph:
    """Operands are parts of one wider row, as merged projections leave them."""
    b, (state,) = paged_builder(case.kv)
    widths = [heads * size for heads, size in case.shapes.values()]
    row = b.op("cast", b.op("embed", arg(b, "ids"), weight("rows", VOCAB, sum(widths) + 3)), dtype=case.dtype)
    *parts, _ = b.op("split", row, several=True, axis=1, sizes=(*widths, 3))
    given = {
        name: b.op("reshape", part, shape=(shared._T, *shape))
        for part, (name, shape) in zip(parts, case.shapes.items(), strict=True)
    }
    rates = weight("rates", case.heads, case.keys, case.values) if case.rates else None
    operands = [given[n] for n in ("q", "k", "v", "decay")]
    tables = [arg(b, n) for n in ("table0", "lens", "starts")]
    y, written = b.op(
        "paged_recurrence", state, *operands, *tables, given.get("beta"), rates, layer=LAYER, several=True
    )
    flat = b.op("reshape", y, shape=(shared._T, case.heads * case.values))
    return b.graph([b.op("cast", flat, dtype=DType.F32), written])


def weights(case: Case, seed: int) -> dict[str, Array]:
    """Decays below 0 and betas in [0, 1], as models have them; short keys, so that the state stays small."""
    rng = np.random.default_rng(seed)
    parts: list[Array] = []
    for name, (heads, size) in case.shapes.items():
        x = rng.standard_normal((VOCAB, heads, size))
        if name == "decay":
            x = np.abs(x) * (0.2 if case.rates else -0.2)
        elif name == "beta":
            x = rng.random(x.shape)
        elif name == "k":
            x /= np.sqrt(np.square(x).sum(-1, keepdims=True)) if case.beta else 1
        parts.append(x.reshape(VOCAB, -1))
    parts.append(np.full((VOCAB, 3), np.nan))
    rows = np.concatenate(parts, 1).astype(np.float32)
    rates = -np.abs(rng.standard_normal((case.heads, case.keys, case.values))).astype(np.float32)
    return {"rows": rows} | ({"rates": rates} if case.rates else {})


@dataclass
class Expected:
    """Of a request's tokens. before: the state that each starts from, [T,H,K,V]."""

    y: Array
    before: Array
    inputs: dict[str, Array]


def expected(case: Case, given: dict[str, Array], ids: Sequence[int]) -> Expected:
    """The definition, head by head, in float64."""
    rounded = given["rows"].astype(case.dtype.numpy).astype(np.float64)[list(ids)]
    inputs: dict[str, Array] = {}
    at = 0
    for name, (heads, size) in case.shapes.items():
        inputs[name] = rounded[:, at : at + heads * size].reshape(-1, heads, size)
        at += heads * size
    states = np.zeros((len(ids), case.heads, case.keys, case.values))
    y = np.zeros((len(ids), case.heads, case.values))
    for h in range(case.heads):
        state, g = np.zeros((case.keys, case.values)), h * case.groups // case.heads
        for t in range(len(ids)):
            states[t, h] = state
            q, k, v, decay = (inputs[n][t] for n in ("q", "k", "v", "decay"))
            if case.rates:
                state = np.exp(given["rates"][h].astype(np.float64) * decay[h]) * state
            else:
                state = np.diag(np.exp(np.broadcast_to(decay[h], case.keys))) @ state
            u = v[h] if not case.beta else inputs["beta"][t, h, 0] * (v[h] - state.T @ k[g])
            state = state + np.outer(k[g], u)
            y[t, h] = state.T @ q[g]
    return Expected(y.reshape(len(ids), -1), states, inputs)


@dataclass
class Request:
    """A request whose only kept block is that of its last token, as the runtime keeps them.

    blocks: the blocks of the cache that it has had, by block index.
    """

    ids: list[int]
    free: list[int]
    block: int = 16
    computed: int = 0
    blocks: dict[int, int] = field(default_factory=dict[int, int])

    def chunk(self, count: int) -> Chunk:
        """The next `count` tokens: blocks before the one of the last are given none, or are given back."""
        end = self.computed + count
        last = (end - 1) // self.block
        read = (self.computed - 1) // self.block if self.computed else -1
        self.blocks = {i: b for i, b in self.blocks.items() if i == read}
        self.blocks.setdefault(last, self.free.pop())
        table = [self.blocks.get(i, -1) for i in range(last + 1)]
        chunk = Chunk(table, self.computed, self.ids[self.computed : end])
        self.computed = end
        return chunk


def random_ids(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, count)]
