"""Linear recurrences as compiled for the CPU, against their definition in float64, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from codegen.errors import CodegenError
from tests.codegen.harness import Array, Chunk, Model, levels
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

F32 = {name: case for name, case in CASES.items() if name != "bf16"}


@pytest.fixture(scope="module", params=F32)
def case(request: pytest.FixtureRequest) -> Case:
    return F32[request.param]


@pytest.fixture(scope="module")
def model(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(graph(case), weights(case, 0), tmp_path_factory.mktemp("recurrence"))


@contextmanager
def engine(model: Model, threads: int = 2) -> Iterator[int]:
    found = model.open(threads)
    try:
        yield found
    finally:
        model.library.octavo_close(found)


def run(
    model: Model, case: Case, ids: list[int], counts: Sequence[int], threads: int = 2
) -> tuple[Array, list[Array]]:
    """y of every token, computed in chunks, and the parts of the last block that is kept."""
    cache, request = model.cache(BLOCKS), Request(ids, list(range(BLOCKS)), case.block)
    with engine(model, threads) as opened:
        y = np.concatenate([model.step(opened, cache, [request.chunk(n)]) for n in counts])
    state = model.decode_cache(cache[0], 0, BLOCKS)
    last = request.blocks[(request.computed - 1) // case.block]
    used = (request.computed - 1) % case.block + 1
    return y, [a[LAYER, last] if n == "state" else a[LAYER, last, :used] for n, a in state.items()]


def test_a_step_computes_the_definition(model: Model, case: Case) -> None:
    """Several requests: one that goes on, one without tokens, one at its start, one of a single token."""
    free, cache = list(np.random.default_rng(1).permutation(BLOCKS)), model.cache(BLOCKS)
    first = Request(random_ids(2, 40), free, case.block)
    second, third = Request(random_ids(3, 17), free, case.block), Request([7], free, case.block)
    with engine(model) as opened:
        opening = model.step(opened, cache, [first.chunk(21)])
        chunks = [first.chunk(19), Chunk([0], 0, []), second.chunk(17), third.chunk(1)]
        y = model.step(opened, cache, chunks)
    parts = [expected(case, weights(case, 0), r.ids) for r in (first, second, third)]
    np.testing.assert_allclose(opening, parts[0].y[:21], RTOL, ATOL)
    want = np.concatenate([parts[0].y[21:], parts[1].y, parts[2].y])
    np.testing.assert_allclose(y, want, RTOL, ATOL)


def test_only_what_a_later_step_reads_is_written(model: Model, case: Case) -> None:
    ids, cache = random_ids(5, 2 * case.block + 3), model.cache(BLOCKS)
    with engine(model) as opened:
        model.step(opened, cache, [Chunk([5, -1, 2], 0, ids)])
    want = expected(case, weights(case, 0), ids)
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


def test_bits_do_not_depend_on_chunks_or_threads(model: Model, case: Case) -> None:
    ids = random_ids(4, 51)
    whole, kept = run(model, case, ids, [51], threads=1)
    for threads, counts in enumerate(CHUNKS, 1):
        y, left = run(model, case, ids, counts, threads=min(threads, 3))
        assert y.tobytes() == whole.tobytes()
        assert [a.tobytes() for a in left] == [a.tobytes() for a in kept]


def test_bits_do_not_depend_on_the_batch(model: Model, case: Case) -> None:
    ids = random_ids(4, 20)
    alone, _ = run(model, case, ids, [18, 2])
    cache, free = model.cache(BLOCKS), list(range(BLOCKS))
    mine, other = Request(ids, free, case.block), Request(random_ids(6, 30), free, case.block)
    with engine(model, threads=3) as opened:
        first = model.step(opened, cache, [other.chunk(16), mine.chunk(18)])[16:]
        second = model.step(opened, cache, [mine.chunk(2), other.chunk(14)])[:2]
    assert np.concatenate([first, second]).tobytes() == alone.tobytes()


@pytest.mark.parametrize("accepted", [0, 1, 4, 6])
def test_rejected_tokens_leave_no_trace(model: Model, case: Case, accepted: int) -> None:
    """Six drafted tokens over a block's end, of which some are kept; then others in their place."""
    drafts, before = 6, case.block - 4
    ids = random_ids(4, 2 * case.block - 2)
    plain, kept = run(model, case, ids, [before, len(ids) - before])
    cache, table, at = model.cache(BLOCKS), [3, 8], before + accepted
    wrong = [*ids[before:at], *((i + 1) % VOCAB for i in ids[at : before + drafts])]
    with engine(model) as opened:
        first = model.step(opened, cache, [Chunk(table[:1], 0, ids[:before])])
        tried = model.step(opened, cache, [Chunk(table, before, wrong)])[:accepted]
        rest = model.step(opened, cache, [Chunk(table, at, ids[at:])])
    assert np.concatenate([first, tried, rest]).tobytes() == plain.tobytes()
    state = model.decode_cache(cache[0], 0, BLOCKS)
    used = (len(ids) - 1) % case.block + 1
    left = [a[LAYER, 8] if n == "state" else a[LAYER, 8, :used] for n, a in state.items()]
    assert [a.tobytes() for a in left] == [a.tobytes() for a in kept]


@pytest.mark.parametrize("isa", levels())
def test_every_isa_level_computes_the_definition(isa: str, tmp_path: Path) -> None:
    case = CASES["gated_delta"]
    model, ids = Model(graph(case), weights(case, 0), tmp_path, isa), random_ids(4, 33)
    y, _ = run(model, case, ids, [17, 16])
    np.testing.assert_allclose(y, expected(case, weights(case, 0), ids).y, RTOL, ATOL)


@pytest.mark.parametrize(
    ("case", "reason"), [(CASES["bf16"], "there is f32"), (Case(1, 1, 5000, 1), "keys of 5000 elements")]
)
def test_what_no_kernel_is_for_is_refused(case: Case, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CodegenError, match=reason):
        Model(graph(case), weights(case, 0), tmp_path)
