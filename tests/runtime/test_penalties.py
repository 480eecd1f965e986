"""Penalties and biases against transformers' rule, against OpenAI's as it is published, and in an engine."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from runtime import EngineError, RequestError, Sampling, generate, sampler
from runtime.completion import Completion
from runtime.penalties import adjust
from runtime.speculation.lookup import LookupDrafter
from tests.runtime.fake import VOCAB, fake_engine, reference
from tests.runtime.test_engine import PROMPTS, SAMPLED, expected

RNG = np.random.default_rng(23)
BIAS = {3: 1.5, 96: -0.25, 40: 100, 41: -100.0}
KINDS: dict[str, dict] = {
    "repetition": dict(repetition_penalty=1.7),
    "presence": dict(presence_penalty=1.25),
    "frequency": dict(frequency_penalty=0.75),
    "favoured": dict(repetition_penalty=0.8, presence_penalty=-0.5, frequency_penalty=-1.0),
    "bias": dict(logit_bias={7: -100.0, 11: 2.5, 0: -1.0, VOCAB - 1: 0.5}),
    "all": dict(
        repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3, logit_bias={5: 3.0, 60: -100}
    ),
}


def by_hand(row: np.ndarray, sampling: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """Token by token, in float64."""
    counts, out = Counter(output), []
    for token, logit in enumerate(row.tolist()):
        if token in prompt or token in counts:
            logit = logit * sampling.repetition_penalty if logit < 0 else logit / sampling.repetition_penalty
        logit -= counts[token] * sampling.frequency_penalty
        logit -= (counts[token] > 0) * sampling.presence_penalty
        out.append(logit + dict(sampling.biases).get(token, 0.0))
    return out


def adjusted(row: np.ndarray, sampling: Sampling, prompt: list[int], output: list[int]) -> np.ndarray:
    return adjust(row, sampling, np.array(prompt + output, np.int32), len(prompt))


@pytest.mark.parametrize("penalty", [1.3, 0.7, 2.0])
def test_repetition_is_transformers(penalty: float) -> None:
    """To the bit."""
    import torch
    from transformers import RepetitionPenaltyLogitsProcessor

    row = (RNG.standard_normal(301) * 6).astype(np.float32)
    row[[5, 6, 7]] = 0.0, -0.0, -np.inf
    ids = [*RNG.integers(0, 301, 90).tolist(), 5, 6, 7]
    rule = RepetitionPenaltyLogitsProcessor(penalty)
    tokens: Any = torch.tensor([ids])
    want = rule(tokens, cast(Any, torch.from_numpy(row.copy())[None]))[0].numpy()
    before, sampling = row.copy(), Sampling(repetition_penalty=penalty)
    for cut in (1, 40, len(ids)):
        got = adjusted(row, sampling, ids[:cut], ids[cut:])
        assert got.dtype == np.float32 and got.tobytes() == want.tobytes()
    assert row.tobytes() == before.tobytes() and want.tobytes() != before.tobytes()


@pytest.mark.parametrize(("frequency", "presence"), [(0.5, 0.0), (0.0, 1.5), (0.3, -0.7), (-2.0, 2.0)])
def test_frequency_and_presence_are_as_published(frequency: float, presence: float) -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence, of the output alone."""
    row = (RNG.standard_normal(301) * 6).astype(np.float32)
    prompt, output = RNG.integers(0, 150, 40).tolist(), RNG.integers(100, 301, 60).tolist() * 3
    c = np.array([output.count(j) for j in range(301)], np.float64)
    want = row.astype(np.float64) - c * frequency - (c > 0).astype(np.float64) * presence
    sampling = Sampling(frequency_penalty=frequency, presence_penalty=presence)
    assert adjusted(row, sampling, prompt, output).tobytes() == want.astype(np.float32).tobytes()
    assert adjusted(row, sampling, prompt + output, []).tobytes() == row.tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_all_together_are_the_definitions(kind: str) -> None:
    row, sampling = (RNG.standard_normal(VOCAB) * 4).astype(np.float32), Sampling(**KINDS[kind])
    prompt, output = RNG.integers(0, 60, 20).tolist(), RNG.integers(30, VOCAB, 30).tolist()
    want = by_hand(row, sampling, prompt, output)
    np.testing.assert_allclose(adjusted(row, sampling, prompt, output), want, rtol=1e-6, atol=1e-6)


def test_what_is_no_number_stays_and_what_is_stays_finite() -> None:
    row = np.array([np.nan, np.inf, -np.inf, 3e38, -3e38, 1.0], np.float32)
    sampling = Sampling(repetition_penalty=0.5, logit_bias={0: 1, 1: -100, 2: 100, 5: 1})
    got = adjusted(row, sampling, [0, 1, 2, 3, 5], [0])
    largest = np.finfo(np.float32).max
    np.testing.assert_array_equal(got, [np.nan, np.inf, -np.inf, largest, np.float32(-3e38), 3.0])
    assert adjusted(row, replace(sampling, repetition_penalty=2.0), [4], [])[4] == -largest


def penalised(prompt: list[int], sampling: Sampling, sample_index: int = 0) -> tuple[list[int], list[float]]:
    """Tokens of the model of tests/runtime/fake.py, and their log-probabilities under its own rows."""
    output, logprobs = list[int](), list[float]()
    for _ in range(sampling.max_new_tokens):
        row = reference(prompt + output, [None])
        output.append(
            sampler.sample(
                np.array(by_hand(row, sampling, prompt, output)),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=sampling.seed or 0,
                sample_index=sample_index,
                position=len(prompt) + len(output),
            )
        )
        logprobs.append(sampler.log_softmax(row)[output[-1]])
    return output, logprobs


def check(done: Completion, prompt: list[int], sampling: Sampling) -> None:
    tokens, logprobs = penalised(prompt, sampling, done.sample_index)
    assert done.token_ids == tokens
    if sampling.logprobs is None:
        return
    assert done.logprobs is not None
    for at, (entry, logprob) in enumerate(zip(done.logprobs, logprobs, strict=True)):
        np.testing.assert_allclose(entry.logprob, logprob, rtol=1e-6)
        top, values = sampler.top(reference(prompt + tokens[:at], [None]), sampling.logprobs)
        assert [token for token, _ in entry.top] == top.tolist()
        np.testing.assert_allclose([value for _, value in entry.top], values, rtol=1e-6)


def requests(logprobs: int | None) -> list[tuple[list[int], Sampling]]:
    """Of each kind, greedy and drawn, beside plain ones."""
    bases = [Sampling(max_new_tokens=20, logprobs=logprobs), replace(SAMPLED, logprobs=logprobs)]
    samplings = [replace(b, **k) for b in bases for k in KINDS.values()]
    return [
        pair
        for i, sampling in enumerate(samplings)
        for pair in ((PROMPTS[i % len(PROMPTS)], sampling), (PROMPTS[i % 3], bases[i % 2]))
    ]


@pytest.mark.parametrize(
    ("logprobs", "options"), [(None, dict()), (2, dict(kv_blocks=7, max_step_tokens=9))], ids=str
)
def test_an_engine_adjusts_the_rows_of_those_who_ask(logprobs: int | None, options: dict) -> None:
    """In mixed batches, preempted or not; and the others' rows are not touched."""
    with fake_engine(**options) as engine:
        submitted = [(p, s, engine.submit(p, s)) for p, s in requests(logprobs)]
        for prompt, sampling, request in submitted:
            check(request.result(), prompt, sampling)
            assert sampling.adjusts or request.result().token_ids == expected(prompt, sampling)
        assert not options.get("kv_blocks") or engine.stats().preemptions > 0


def test_samples_count_their_own_output() -> None:
    sampling = replace(SAMPLED, n=4, **KINDS["all"])
    with fake_engine(max_requests=2) as engine:
        for done in engine.submit(PROMPTS[3], sampling).results():
            check(done, PROMPTS[3], sampling)


def test_rows_after_drafts_count_them() -> None:
    """Of texts of one token, in which drafts are right, until a penalty ends that."""
    bias = {7: 9.0}
    circling = Sampling(24, repetition_penalty=1.2, frequency_penalty=0.5, logit_bias=bias, draft_tokens=4)
    with fake_engine(drafter=LookupDrafter()) as engine:
        requests = [engine.submit([7] * 4 * n, replace(circling, logprobs=n)) for n in (2, 3)]
        for request, n in zip(requests, (2, 3), strict=True):
            check(request.result(), [7] * 4 * n, replace(circling, logprobs=n))
        stats = engine.stats()
    assert stats.accepted_tokens > 4 and stats.drafted_tokens > stats.accepted_tokens


def test_a_broken_row_fails_its_request_alone() -> None:
    sampling = Sampling(max_new_tokens=8, logprobs=1, **KINDS["all"])
    prompts = [[1, 2, 3], [4, 5], [6]]
    outputs = [penalised(p, sampling)[0] for p in prompts]
    bad = next(t for t in outputs[1][:-1] if t not in outputs[0] + outputs[2] + [3, 5, 6])
    with fake_engine() as engine:
        cast(Any, engine._executor).nan = bad
        requests = [engine.submit(p, sampling) for p in prompts]
        with pytest.raises(EngineError, match="NaN"):
            requests[1].result()
        assert [r.result().token_ids for r in (requests[0], requests[2])] == [outputs[0], outputs[2]]


def test_keywords_of_generate_are_a_sampling() -> None:
    with fake_engine() as engine:
        for given in KINDS.values():
            sampling = Sampling(max_new_tokens=6, **given)
            (done,) = cast(list[Completion], generate(engine, PROMPTS[1], max_new_tokens=6, **given))
            check(done, PROMPTS[1], sampling)


@pytest.mark.parametrize("kind", ["repetition", "presence", "frequency", "bias"])
def test_refused_with_beams(kind: str) -> None:
    with pytest.raises(RequestError, match=next(iter(KINDS[kind]))):
        Sampling(beams=2, **KINDS[kind])


def test_biases_are_pairs_by_id_of_tokens_that_there_are() -> None:
    sampling = Sampling(logit_bias=BIAS)
    assert sampling.biases == ((3, 1.5), (40, 100.0), (41, -100.0), (96, -0.25))
    assert replace(sampling, seed=3).biases == sampling.biases == Sampling(logit_bias=sampling.biases).biases
    assert hash(sampling) == hash(Sampling(logit_bias=dict(reversed(BIAS.items()))))
    assert sampling.adjusts and not Sampling(logit_bias={}, repetition_penalty=1).adjusts
    numpys: Any = {np.int64(3): np.float32(0.5)}
    assert Sampling(logit_bias=numpys).biases == ((3, 0.5),)
    with fake_engine() as engine, pytest.raises(RequestError, match=f"token {VOCAB}.*below {VOCAB}"):
        engine.submit([1], Sampling(logit_bias={2: 1.0, VOCAB: 1.0}))
