"""The demo model's greedy tokens are transformers', and they do not depend on what else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime

NEW_TOKENS = 64
FEWER = 24  # tokens alone and under each option: over the end of a block, and past the prompts' last chunks
TIE = 0.002  # below this margin two float32 implementations may choose differently


@pytest.fixture(scope="module")
def engine(demo_f32: Path) -> Iterator[runtime.Engine]:
    engine = runtime.load(demo_f32, prefix_cache=False)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def together(engine: runtime.Engine, greedy_cases: list[dict[str, Any]]) -> list[Any]:
    """Each case's completion, generated with all the others."""
    prompts = [case["prompt_ids"] for case in greedy_cases]
    return runtime.generate(engine, prompts, max_new_tokens=NEW_TOKENS, logprobs=3)


def first_difference(ours: list[int], theirs: list[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)


@pytest.mark.parametrize("index", range(18))
def test_tokens_are_those_of_transformers(
    together: list[Any], greedy_cases: list[dict[str, Any]], index: int
) -> None:
    case, ours = greedy_cases[index], together[index].token_ids
    step = first_difference(ours, case["new_ids"])
    if step is None:
        assert len(ours) == len(case["new_ids"])
    else:
        assert case["margins"][step] < TIE, (
            f"differs at step {step}: {ours[step]}, not {case['new_ids'][step]}"
        )


def test_texts_tokenize_to_the_ids_that_transformers_gives(
    engine: runtime.Engine, greedy_cases: list[dict[str, Any]]
) -> None:
    prompts: list[Any] = [
        [{"role": "user", "content": c["prompt"]}] if c["kind"] == "chat" else c["prompt"]
        for c in greedy_cases
    ]
    completions = runtime.generate(engine, prompts, max_new_tokens=1, prompt_logprobs=0)
    for case, completion in zip(greedy_cases, completions, strict=True):
        assert list(completion.prompt_token_ids) == case["prompt_ids"], case["prompt"]


def assert_begins(ours: list[Any], expected: list[Any]) -> None:
    """Not a bit of the first tokens differs."""
    for a, b in zip(ours, expected, strict=True):
        assert list(a.token_ids) == list(b.token_ids[:FEWER])
        assert list(a.logprobs) == list(b.logprobs[:FEWER])


def test_alone_each_gives_exactly_what_all_in_one_batch_give(
    engine: runtime.Engine, together: list[Any], greedy_cases: list[dict[str, Any]]
) -> None:
    prompts = [case["prompt_ids"] for case in greedy_cases]
    alone = [runtime.generate(engine, [p], max_new_tokens=FEWER, logprobs=3)[0] for p in prompts]
    assert_begins(alone, together)


@pytest.mark.parametrize("options", [{"max_step_tokens": 16}, {"threads": 1}, {"prefix_cache": True}])
def test_a_step_budget_threads_and_prefix_hits_change_nothing(
    demo_f32: Path, together: list[Any], greedy_cases: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    engine = runtime.load(demo_f32, **options)
    prompts = [case["prompt_ids"] for case in greedy_cases]
    try:
        for _ in range(1 + bool(options.get("prefix_cache"))):  # the second time every prompt hits
            assert_begins(runtime.generate(engine, prompts, max_new_tokens=FEWER, logprobs=3), together)
    finally:
        engine.close()
