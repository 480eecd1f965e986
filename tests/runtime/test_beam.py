"""Beam search gives the texts and scores of transformers, however it is scheduled.

tests/data/beam_tables.json was made with transformers 5.24.0: `generate(num_beams=..., do_sample=False,
eos_token_id=ends, use_cache=False)` on a PreTrainedModel whose forward returns `table(...)` of the tokens so
far as the last position's logits; sequences are cut to their own length (beam_indices >= 0), and scores are
its sequences_scores.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import sampler
from runtime.beam import BeamSearch
from tests.runtime.fake import mix

TABLES = json.loads((Path(__file__).parents[1] / "data" / "beam_tables.json").read_text())["cases"]
Logits = Callable[[list[int]], np.ndarray]


def table(seed: int, vocab: int, ends: list[int], boost: int) -> Logits:
    """A model: uniform logits in [-3, 3), of end tokens more by `boost`."""

    def logits(tokens: list[int]) -> np.ndarray:
        counter = np.zeros((vocab, 4), np.uint64)
        counter[:, 0] = np.arange(vocab)
        words = sampler.philox(counter, mix(seed, *tokens))[:, 0]
        row = (words.astype(np.float64) * (6.0 / 2**32) - 3.0).astype(np.float32)
        row[ends] += np.float32(boost)
        return row

    return logits


def logprobs(logits: np.ndarray) -> np.ndarray:
    """Rounded to f32, as the executor gives them; f64 [V]."""
    return sampler.log_softmax(logits).astype(np.float32).astype(np.float64)


def searched(logits: Logits, prompt: list[int], search: BeamSearch) -> list[tuple[list[int], float]]:
    while not search.done:
        rows = []
        for beam in search.live:
            row = logprobs(logits(prompt + [t.token_id for t in beam.tokens()]))
            best = np.argsort(-row, kind="stable")[: search.width]
            rows.append([(int(i), float(row[i])) for i in best])
        search.step(rows)
    return [([t.token_id for t in beam.tokens()], score) for score, beam in search.outcome()]


def plain(
    logits: Logits,
    prompt: list[int],
    *,
    beams: int,
    ends: list[int],
    max_length: int,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
) -> list[tuple[list[int], float]]:
    """The rules over whole vocabularies and whole texts, in transformers' order and with its marks: a text
    that must not be chosen has 1e9 taken from its score."""
    live = [(0.0, [])]
    finished: list[tuple[float, list[int], bool]] = [(-1e9, [], False)] * beams
    keep = max(2, 1 + len(ends)) * beams
    while True:
        texts = [
            (total + lp, [*tokens, t])
            for total, tokens in live
            for t, lp in enumerate(logprobs(logits(prompt + tokens)))
        ]
        texts = sorted(texts, key=lambda c: -c[0])[:keep]
        length = len(texts[0][1])
        hits = [length == max_length or tokens[-1] in ends for _, tokens in texts]
        marked = [(total - 1e9 * hit, tokens) for (total, tokens), hit in zip(texts, hits, strict=True)]
        live = sorted(marked, key=lambda c: -c[0])[:beams]
        ended = [hit and place < beams for place, hit in enumerate(hits)]
        scored = [
            (total / length**length_penalty - 1e9 * (not end), tokens, end)
            for (total, tokens), end in zip(texts, ended, strict=True)
        ]
        finished = sorted(finished + scored, key=lambda c: -c[0])[:beams]
        full = all(end for _, _, end in finished)
        long = max_length if early_stopping == "never" and length_penalty > 0 else length
        hopeless = full and live[0][0] / long**length_penalty <= min(score for score, _, _ in finished)
        if all(hits) or hopeless or (full and early_stopping is True):
            return [(tokens, score) for score, tokens, end in finished if end]


@pytest.mark.parametrize("case", TABLES, ids=lambda case: str(case["seed"]))
def test_texts_and_scores_are_those_of_transformers(case: dict[str, Any]) -> None:
    options = {name: case[name] for name in ("beams", "ends", "length_penalty", "early_stopping")}
    logits, length = table(case["seed"], case["vocab"], case["ends"], case["boost"]), case["max_new_tokens"]
    wanted = list(zip(case["token_ids"], case["scores"], strict=True))
    search = BeamSearch(**options, max_length=length)
    for found in (
        searched(logits, case["prompt"], search),
        plain(logits, case["prompt"], **options, max_length=length),
    ):
        assert [tokens for tokens, _ in found[: case["n"]]] == [tokens for tokens, _ in wanted]
        for (_, score), (_, theirs) in zip(found, wanted, strict=False):
            assert score == pytest.approx(theirs, rel=1e-6, abs=2e-5)


def test_the_cases_end_in_every_way() -> None:
    early = [c for c in TABLES if len(c["token_ids"][0]) < c["max_new_tokens"]]
    assert {c["early_stopping"] for c in early} == {False, True, "never"}
    assert {c["length_penalty"] for c in early} == {1.0, 0.6, 2.0, 0.0, -0.5}
    assert len(early) > 20 and len(TABLES) - len(early) > 20


@pytest.mark.parametrize("seed", range(12))
def test_texts_and_scores_are_those_of_the_plain_search(seed: int) -> None:
    rng = np.random.default_rng(seed)
    beams, vocab = int(rng.choice([2, 7, 16])), int(rng.choice([40, 97]))
    ends = rng.choice(vocab, int(rng.integers(0, 4)), replace=False).tolist()
    logits = table(seed, vocab, ends, int(rng.integers(0, 4)))
    options: dict[str, Any] = {
        "beams": beams,
        "ends": ends,
        "max_length": int(rng.choice([1, 2, 12])),
        "length_penalty": float(rng.choice([1.0, 0.7, 0.0, -1.0, 3.0])),
        "early_stopping": [False, True, "never"][seed % 3],
    }
    assert searched(logits, [1, 2], BeamSearch(**options)) == plain(logits, [1, 2], **options)


def test_ties_go_to_the_better_parent_then_to_the_lower_token() -> None:
    search = BeamSearch(3, [], 4)
    assert search.step([[(5, -1.0), (7, -1.0), (2, -2.0), (4, -2.0)]]) == [0, 0, 0]
    assert [beam.token.token_id for beam in search.live if beam.token] == [5, 7, 2]
    rows = [[(9, -2.0), (8, -3.0), (1, -4.0)], [(3, -2.0), (6, -2.0), (0, -9.0)], [(0, -1.0)] * 3]
    assert search.step(rows) == [0, 1, 1]
    assert [[t.token_id for t in beam.tokens()] for beam in search.live] == [[5, 9], [7, 3], [7, 6]]


def test_a_text_that_ends_beyond_the_first_is_dropped() -> None:
    search = BeamSearch(2, [0], 9)
    search.step([[(3, -1.0), (4, -2.0), (0, -3.0)]])
    assert search.finished == [] and len(search.live) == 2
    search.step([[(0, -0.5), (5, -2.0), (6, -3.0)], [(1, -5.0), (2, -6.0), (0, -7.0)]])
    assert [score for score, _ in search.finished] == [-0.75]
    assert [beam.total for beam in search.live] == [-3.0, -4.0]


def test_the_outcome_before_the_end_has_live_beams_too() -> None:
    search = BeamSearch(2, [0], 9, alternatives=1)
    assert search.outcome() == []
    search.step([[(0, -1.0), (4, -2.0), (3, -3.0)]])
    (score, text), (other, live) = search.outcome()
    assert (score, other) == (-1.0, -2.0)
    assert text.tokens() == [(0, -1.0, ((0, -1.0),))] and live.tokens() == [(4, -2.0, ((0, -1.0),))]


@pytest.mark.parametrize(("length_penalty", "long_wins"), [(-1.0, False), (1.0, True), (0.0, False)])
def test_never_supposes_the_longest_text_where_long_ones_score_better(length_penalty, long_wins) -> None:
    search = BeamSearch(2, [0], 9, length_penalty=length_penalty, early_stopping="never")
    search.step([[(0, -1.0), (3, -1.1), (4, -5.0)]])
    search.step([[(5, -0.6), (0, -1.0), (6, -9.0)], [(1, -9.0), (2, -9.0), (0, -9.0)]])
    assert len(search.finished) == 2 and not search.done  # -1.7 may yet beat what is worst of -1.0 and -2.1
    rest = [(7, -0.8), (8, -9.0), (0, -9.0)]
    search.step([rest, rest])
    assert (
        search.done != long_wins
    )  # -2.5 / 9 is better than -2.1 / 2, and -2.5 * 3 is not better than -2.1 * 2
