"""Another model as the drafter: what it computes, what it keeps, and that no output changes with it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime import Sampling, generate
from runtime.completion import Completion
from runtime.engine import Engine
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.limits import Limits
from runtime.speculation.engine import EngineDrafter
from tests.runtime.fake import VOCAB, FakeExecutor, Window, fake_engine, group_of

CONTEXT = 256


class Watched(EngineDrafter):
    """Looks for broken blocks after every call."""

    def draft(self, chunks: Any, wanted: Any) -> Any:
        before = [c.seq.ids[: c.seq.num_tokens].copy() for c in chunks]
        found = super().draft(chunks, wanted)
        self.check()
        for chunk, ids, count, most in zip(chunks, before, found, wanted, strict=True):
            assert (chunk.seq.ids[: len(ids)] == ids).all() and 0 <= count <= most
        for shadow in self.shadows.values():
            assert shadow.computed <= shadow.num_tokens
        return found


def drafter(
    *,
    kv_blocks: int = 64,
    windows: tuple[Window, ...] = (None,),
    quantized: tuple[int, ...] = (),
    context: int = CONTEXT,
    step_tokens: int = 64,
    vocab: int = VOCAB,
    requests: int = 8,
) -> Watched:
    """Of the fake model; equal windows and groups make an equal model."""
    groups = [*(group_of(kv_blocks, w) for w in windows), *(Group(kv_blocks, None, True) for _ in quantized)]
    executor = FakeExecutor([kv_blocks] * len(groups), list(windows), quantized=quantized)
    limits = Limits(step_tokens, requests, 0)
    return Watched("other", executor, Cache(groups), limits, context, vocab)


def engine(**options: Any) -> Engine:
    return fake_engine(max_context=CONTEXT, max_step_tokens=64, max_requests=8, **options)


def prompts(count: int, seed: int = 0, low: int = 1, high: int = 60) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, rng.integers(low, high)).tolist() for _ in range(count)]


def told(completions: list[Completion]) -> list[tuple[list[int], Any]]:
    return [(c.token_ids, c.logprobs) for c in completions]


def run(target: Engine, asked: list[list[int]], **sampling: Any) -> list[Completion]:
    with target:
        found = generate(target, asked, Sampling(logprobs=2, **sampling))
        assert isinstance(found, list)
        return found


@pytest.mark.parametrize("windows", [(None,), (None, "state")])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.9, "top_p": 0.8, "seed": 5}])
def test_the_same_model_drafts_what_the_target_gives(
    sampling: dict[str, Any], windows: tuple[Window, ...]
) -> None:
    asked = prompts(3)
    plain = run(engine(windows=windows), asked, max_new_tokens=40, **sampling)
    other = drafter(windows=windows)
    found = run(engine(drafter=other, windows=windows), asked, max_new_tokens=40, draft_tokens=4, **sampling)
    assert told(found) == told(plain)
    for completion in found:
        assert completion.draft is not None
        assert completion.draft.drafted == completion.draft.accepted > 25
    assert not other.shadows, "those of finished requests are forgotten"
    other.check()
    assert other._executor.closed  # type: ignore[attr-defined]


def test_each_token_is_computed_once_where_all_drafts_are_right() -> None:
    other, asked = drafter(), prompts(1, low=20, high=21)
    run(engine(drafter=other), asked, max_new_tokens=41, draft_tokens=4)
    executor = other._executor
    assert isinstance(executor, FakeExecutor)
    assert sum(tokens for tokens, _ in executor.steps) <= 20 + 41


CROWD = [*prompts(5, seed=3), prompts(5, seed=3)[0] + [5, 6], prompts(5, seed=3)[1][:10]]
CROWDED = {"max_new_tokens": 20, "temperature": 1.0, "seed": 3, "n": 2}


@pytest.fixture(scope="module")
def crowd() -> list[Completion]:
    """What more requests than places give, in a target that runs out of blocks."""
    return run(engine(kv_blocks=20), CROWD, **CROWDED)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_blocks": 3},
        {"kv_blocks": 7},
        {"context": 48},
        {"step_tokens": 8},
        {"vocab": 95},
        {"windows": (None, 24)},
        {"windows": (20,), "kv_blocks": 9},
        {"quantized": (0,), "kv_blocks": 12},
        {"windows": ("state", None), "kv_blocks": 9},
        {"windows": ("state",), "kv_blocks": 5},
    ],
)
def test_any_other_model_in_any_memory_changes_nothing(
    options: dict[str, Any], crowd: list[Completion]
) -> None:
    other = drafter(**options)
    found = run(engine(kv_blocks=20, drafter=other, draft_rows=40), CROWD, **CROWDED, draft_tokens=3)
    assert told(found) == told(crowd)
    assert any(c.draft is not None and c.draft.drafted for c in found)
    other.check()
    assert not other.shadows and all(pool.num_free == pool.num_blocks for pool in other.cache.pools)


@pytest.mark.parametrize("quantized", [(), (0,)])
def test_after_a_wrong_draft_the_next_are_right(quantized: tuple[int, ...]) -> None:
    """Every seventh position's is made wrong. What followed is computed anew, and blocks quantised anew."""
    asked = prompts(2, seed=9)
    options = {"max_new_tokens": 60, "temperature": 1.0, "seed": 1}
    plain = run(engine(quantized=quantized), asked, **options)
    other = drafter(quantized=quantized)
    draw = other._draw

    def wrong_at_times(shadows: Any, logits: Any) -> None:
        draw(shadows, logits)
        for shadow in shadows:
            at = shadow.num_tokens + shadow.drafted - 1
            if at % 7 == 0:
                shadow.ids[at] = (shadow.ids[at] + 1) % VOCAB

    other._draw = wrong_at_times  # type: ignore[method-assign]
    found = run(engine(quantized=quantized, drafter=other), asked, **options, draft_tokens=5)
    assert told(found) == told(plain)
    for completion in found:
        assert completion.draft is not None
        refused = [drafted - accepted for drafted, accepted in completion.draft.by_position]
        assert max(refused) <= min(refused) + 1 < 10, "five are right, then none, in turn"


def test_a_prompt_is_computed_over_several_steps_and_shared() -> None:
    other = drafter(step_tokens=16)
    asked = prompts(1, low=100, high=101) * 3
    found = run(engine(drafter=other), asked, max_new_tokens=40, draft_tokens=3)
    executor = other._executor
    assert isinstance(executor, FakeExecutor)
    assert max(tokens for tokens, _ in executor.steps) <= 16
    assert sum(tokens for tokens, _ in executor.steps) < 2 * 100 + 3 * 60, "blocks of one prompt are shared"
    assert all(c.draft is not None and c.draft.accepted for c in found)


def test_a_failed_step_of_the_drafter_loses_no_block() -> None:
    other = drafter()
    executor = other._executor
    assert isinstance(executor, FakeExecutor)
    calls = 0
    forward = executor.forward

    def at_times(step: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls % 5 == 3:
            raise RuntimeError("the drafter broke")
        return forward(step)

    executor.forward = at_times  # type: ignore[method-assign]
    asked = prompts(3)
    found = run(engine(drafter=other), asked, max_new_tokens=20, draft_tokens=3)
    assert told(found) == told(run(engine(), asked, max_new_tokens=20))
    other.check()
    assert not other.shadows
