"""Linear recurrences under Triton's interpreter, against their definition in float64, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from codegen.errors import CodegenError
from codegen.kv_block import block_bytes
from ir.types import DType
from tests.codegen.harness import Array, Chunk, aligned
from tests.codegen.recurrences import (
    ATOL,
    BLOCKS,
    CASES,
    CHUNKS,
    LAYER,
    LAYERS,
    RTOL,
    VOCAB,
    Case,
    Request,
    expected,
    graph,
    random_ids,
    weights,
)
from tests.triton.harness import TritonModel


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
