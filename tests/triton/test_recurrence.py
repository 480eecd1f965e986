"""Linear recurrences under Triton's interpreter, against their definition in float64, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import pytest

from codegen.errors import CodegenError
from codegen.kv_block import block_bytes
from ir.graph import Graph
from ir.ops.recurrence import recurrence_streams
from ir.types import KV, DType
from tests.codegen import test_attention as shared
from tests.codegen.harness import Array, Chunk, aligned, arg, paged_builder, weight
from tests.triton.harness import TritonModel

VOCAB, BLOCKS, LAYERS, LAYER = 50, 12, 3, 1
RTOL, ATOL = 2e-4, 2e-5


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


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


def model_of(case: Case, directory: Path, seed: int = 0) -> TritonModel:
    return TritonModel(graph(case), weights(case, seed), directory)


def guarded(model: TritonModel) -> tuple[Array, list[Array]]:
    """A block's bytes that nothing may touch, and after it a poisoned cache."""
    size = block_bytes(model.states[0])
    whole = aligned((1 + BLOCKS) * size, np.uint8, 255)
    return whole[:size], [whole[size:]]


def random_ids(seed: int, count: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(seed).integers(0, VOCAB, count)]


def run(model: TritonModel, case: Case, ids: list[int], counts: Sequence[int]) -> tuple[Array, list[Array]]:
    """y of every token, computed in chunks, and the parts of the last block that is kept."""
    cache = guarded(model)[1]
    request = Request(ids, list(range(BLOCKS)), case.block)
    y = np.concatenate([model.step(cache, [request.chunk(n)]) for n in counts])
    state = model.decode_cache(cache[0], 0, BLOCKS)
    last = request.blocks[(request.computed - 1) // case.block]
    used = (request.computed - 1) % case.block + 1
    kept = [a[LAYER, last] if n == "state" else a[LAYER, last, :used] for n, a in state.items()]
    return y, kept


def test_a_step_computes_the_definition(tmp_path: Path, case: Case) -> None:
    """Several requests: one at its start, one that goes on, one without tokens, one of a single token."""
    model, given = model_of(case, tmp_path), weights(case, 0)
    free = list(np.random.default_rng(1).permutation(BLOCKS))
    first = Request(random_ids(2, 40), free, case.block)
    second, third = Request(random_ids(3, 17), free, case.block), Request([7], free, case.block)
    cache = guarded(model)[1]
    opening = model.step(cache, [first.chunk(21)])
    empty = Chunk([0], 0, [])
    y = model.step(cache, [first.chunk(19), empty, second.chunk(17), third.chunk(1)])
    parts = [expected(case, given, r.ids) for r in (first, second, third)]
    rtol = 2**-8 if case.dtype is DType.BF16 else RTOL  # results are rounded to it
    np.testing.assert_allclose(opening, parts[0].y[:21], rtol, ATOL)
    want = np.concatenate([parts[0].y[21:], parts[1].y, parts[2].y])
    np.testing.assert_allclose(y, want, rtol, ATOL)


def test_only_what_a_later_step_reads_is_written(tmp_path: Path, case: Case) -> None:
    model, given = model_of(case, tmp_path), weights(case, 0)
    ids = random_ids(5, 2 * case.block + 3)
    guard, cache = guarded(model)
    model.step(cache, [Chunk([5, -1, 2], 0, ids)])
    assert (guard == 255).all()
    want = expected(case, given, ids)
    names = {"key": "k", "value": "v", "decay": "decay", "beta": "beta"}
    for name, array in model.decode_cache(cache[0], 0, BLOCKS).items():
        for other in set(range(LAYERS)) - {LAYER}:
            assert np.isnan(array[other]).all()
        found = array[LAYER]
        assert np.isnan(np.delete(found, [5, 2], 0)).all()
        for block, first in ((5, 0), (2, 2 * case.block)):
            if name == "state":
                state = want.before[first].reshape(case.heads, -1)
                np.testing.assert_allclose(found[block], state, RTOL, ATOL)
                continue
            tokens = want.inputs[names[name]][first : first + case.block]
            assert np.array_equal(found[block, : len(tokens)], tokens.astype(np.float32))
            assert np.isnan(found[block, len(tokens) :]).all()


CHUNKS = ([1, 1, 15, 16, 17, 1], [17, 16, 15, 3], [16, 16, 16, 3], [33, 1, 17], [15, 1, 1, 31, 3], [50, 1])


@pytest.mark.parametrize("name", ["gated_delta", "channels", "rates", "grouped", "small_blocks"])
def test_bits_do_not_depend_on_chunks(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model, ids = model_of(case, tmp_path), random_ids(4, 51)
    whole, kept = run(model, case, ids, [51])
    for counts in CHUNKS:
        y, left = run(model, case, ids, counts)
        assert y.tobytes() == whole.tobytes()
        assert [a.tobytes() for a in left] == [a.tobytes() for a in kept]


def test_bits_do_not_depend_on_the_batch(tmp_path: Path) -> None:
    case = CASES["gated_delta"]
    model, ids = model_of(case, tmp_path), random_ids(4, 20)
    alone, _ = run(model, case, ids, [18, 2])
    cache, free = guarded(model)[1], list(range(BLOCKS))
    mine, other = Request(ids, free), Request(random_ids(6, 30), free)
    first = model.step(cache, [other.chunk(16), mine.chunk(18)])[16:]
    second = model.step(cache, [mine.chunk(2), other.chunk(14)])[:2]
    assert np.concatenate([first, second]).tobytes() == alone.tobytes()


@pytest.mark.parametrize("accepted", [0, 1, 4, 6])
def test_rejected_tokens_leave_no_trace(tmp_path: Path, accepted: int) -> None:
    """Six drafted tokens over a block's end, of which some are kept; then others in their place."""
    case, drafts = CASES["gated_delta"], 6
    model, ids = model_of(case, tmp_path), random_ids(4, 24)
    plain, kept = run(model, case, ids, [12, 12])
    cache, table = guarded(model)[1], [3, 8]
    first = model.step(cache, [Chunk(table[:1], 0, ids[:12])])
    wrong = [*ids[12 : 12 + accepted], *((i + 1) % VOCAB for i in ids[12 + accepted : 12 + drafts])]
    tried = model.step(cache, [Chunk(table, 12, wrong)])[:accepted]
    at = 12 + accepted
    rest = model.step(cache, [Chunk(table, at, ids[at:])])
    assert np.concatenate([first, tried, rest]).tobytes() == plain.tobytes()
    state = model.decode_cache(cache[0], 0, BLOCKS)
    left = [a[LAYER, 8] if n == "state" else a[LAYER, 8, :8] for n, a in state.items()]
    assert [a.tobytes() for a in left] == [a.tobytes() for a in kept]


def test_keys_that_no_program_holds_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CodegenError, match="keys of 20000 channels; a program holds 16384 at most"):
        model_of(Case(1, 1, 20000, 1), tmp_path)
