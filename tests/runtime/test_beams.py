"""Beams on the cache: whatever the blocks, steps and company, the texts and scores of a plain search."""

from __future__ import annotations

import functools
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime import EngineError, RequestError, Sampling, generate, sampler
from runtime.engine import Engine
from tests.runtime.fake import VOCAB, fake_engine, reference
from tests.runtime.test_beam import plain

RNG = np.random.default_rng(11)
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (1, 16, 17, 33)]
ENDS = (3, 14, 15, 92, 65)
FOUR = Sampling(24, beams=4, n=4, logprobs=2)
SAMPLINGS = [
    FOUR,
    Sampling(24, beams=2, early_stopping=True, length_penalty=0.5, logprobs=2),
    Sampling(24, beams=3, n=2, early_stopping="never", length_penalty=2.0, logprobs=2),
    Sampling(1, beams=3, n=3, logprobs=2),
]
Windows = tuple[int | None, ...]


@functools.cache
def logits(tokens: tuple[int, ...], windows: Windows) -> np.ndarray:
    return reference(list(tokens), list(windows))


@functools.cache
def wanted(prompt: tuple[int, ...], sampling: Sampling, windows: Windows = (None,), ends=ENDS):
    found = plain(
        lambda tokens: logits(tuple(tokens), windows),
        list(prompt),
        beams=sampling.beams,
        ends=list(ends),
        max_length=sampling.max_new_tokens,
        length_penalty=sampling.length_penalty,
        early_stopping=sampling.early_stopping,
    )
    return found[: sampling.n]


def check(prompt: list[int], sampling: Sampling, completions, windows: Windows = (None,), ends=ENDS) -> None:
    texts = wanted(tuple(prompt), sampling, windows, ends)
    assert [(c.token_ids, c.score) for c in completions] == texts
    assert [c.sample_index for c in completions] == list(range(sampling.n))
    for c in completions:
        assert c.finish_reason == ("stop" if c.token_ids[-1] in ends else "length")
        tokens = list(prompt)
        for entry, token_id in zip(c.logprobs, c.token_ids, strict=True):
            row = sampler.log_softmax(logits(tuple(tokens), windows)).astype(np.float32)
            assert entry[:2] == (token_id, float(row[token_id]))
            assert [i for i, _ in entry.top] == np.argsort(-row, kind="stable")[:2].tolist()
            tokens.append(token_id)


def smallest(prompt: list[int], sampling: Sampling, windows: Windows, **options: Any) -> Engine:
    """The engine with the fewest blocks that takes this request."""
    for blocks in range(1, 200):
        engine = fake_engine(kv_blocks=blocks, windows=windows, eos=ENDS, **options)
        try:
            engine.prepare(prompt, sampling)
            return engine
        except RequestError:
            engine.close()
    raise AssertionError("no engine takes it")


def test_texts_end_in_every_way_and_differ_by_the_parameters() -> None:
    reasons = [t[-1] in ENDS for s in SAMPLINGS for p in PROMPTS for t, _ in wanted(tuple(p), s)]
    assert 5 < sum(reasons) < len(reasons) - 5
    best = {s: [wanted(tuple(p), s)[0][0] for p in PROMPTS] for s in SAMPLINGS}
    assert all(best[a] != best[b] for a in SAMPLINGS for b in SAMPLINGS if a != b)


@pytest.mark.parametrize(
    ("windows", "options"),
    [
        ((None,), dict()),
        ((20,), dict()),
        ((None, 9), dict()),
        ((None,), dict(max_step_tokens=1)),
        ((None,), dict(max_step_tokens=7, max_requests=4)),
        ((None, 9), dict(max_step_tokens=7, max_requests=4)),
        ((None,), dict(prefix_cache=False)),
    ],
    ids=str,
)
def test_the_fewest_blocks_suffice_alone_and_in_company(windows: Windows, options: dict[str, Any]) -> None:
    prompt = PROMPTS[3]
    with smallest(prompt, FOUR, windows, **options) as engine:
        check(prompt, FOUR, engine.submit(prompt, FOUR).results(30), windows)
        assert engine.stats().preemptions == 0  # alone
        together = [(PROMPTS[(i + k) % 4], s) for i in (0, 1) for k, s in enumerate(SAMPLINGS)]
        sampled = Sampling(20, temperature=1.0, seed=3, n=2, ignore_eos=True)
        with engine._loop.alone():  # they all come at once
            company = [engine.submit(p, sampled) for p in PROMPTS]
            requests = [engine.submit(p, s, priority=i % 3) for i, (p, s) in enumerate(together)]
        for request, (p, s) in zip(requests, together, strict=True):
            check(p, s, request.results(60), windows)
        for request in company:
            assert all(len(c.token_ids) == 20 for c in request.results(60))
        engine._core.scheduler.check()
        stats = engine.stats()
        assert stats.preemptions > 0 or windows != (None,) or options
        assert stats.blocks_used == [0] * len(windows) and stats.running == stats.waiting == 0


@pytest.mark.parametrize("step_tokens", [1, 7, 64])
def test_a_tail_needs_a_block_for_each_beam_and_one_to_go(step_tokens: int) -> None:
    prompt, options = PROMPTS[3], dict(quantized=(0,), max_step_tokens=step_tokens, eos=ENDS)
    with fake_engine(kv_blocks=[200, 200], **options) as engine:
        alone = [c.token_ids for c in engine.submit(prompt, FOUR).results(30)]
    with fake_engine(kv_blocks=[14, 4], **options) as engine, pytest.raises(RequestError, match="4 beams"):
        engine.submit(prompt, FOUR)
    with fake_engine(kv_blocks=[14, 5], **options) as engine:
        assert [c.token_ids for c in engine.submit(prompt, FOUR).results(30)] == alone
        assert engine.stats().preemptions == 0
        requests = [engine.submit(prompt, FOUR) for _ in range(3)]
        assert all([c.token_ids for c in r.results(60)] == alone for r in requests)


def test_one_block_less_is_refused() -> None:
    with smallest(PROMPTS[3], FOUR, (None,)) as engine:
        # two full blocks of the prompt's 33 tokens, then for each of 4 beams two of its 56, and one to go
        assert engine.stats().blocks_total == [2 + 4 * (2 + 1)]
    with fake_engine(kv_blocks=13) as engine, pytest.raises(RequestError, match="for each of 4 beams"):
        engine.submit(PROMPTS[3], FOUR)
    with (
        fake_engine(kv_blocks=19, prefix_cache=False) as engine,
        pytest.raises(RequestError, match="4 beams"),
    ):
        engine.submit(PROMPTS[3], FOUR)


def test_more_beams_than_places_are_refused_for_that_also_where_blocks_lack() -> None:
    with (
        fake_engine(max_requests=3, kv_blocks=13) as engine,
        pytest.raises(RequestError, match="4 beams; this engine runs 3 sequences at once"),
    ):
        engine.submit(PROMPTS[3], FOUR)


@pytest.mark.parametrize("evict", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_preemption_between_any_two_steps_changes_nothing(prefix_cache, evict) -> None:
    """All beams at once, also when some of them have their rows and others not."""
    sampling, prompt, rng = SAMPLINGS[2], PROMPTS[2], np.random.default_rng(1)
    with fake_engine(eos=ENDS, max_step_tokens=2, prefix_cache=prefix_cache) as engine:
        core, waited = engine._core, []
        go = core.step

        def step() -> bool:
            running = core.scheduler.running
            if len(running) > 1 and rng.random() < 0.02:
                waited.append(sum(seq.computed == seq.num_tokens for seq in running))
                core.scheduler._preempt(running[rng.integers(len(running))], "the test wants it")
                assert not running, "beams are preempted as one"
                if evict:  # nobody holds blocks now
                    engine._cache.pools[0].__init__(engine._cache.pools[0].num_blocks)
            done = go()
            core.scheduler.check()
            return done

        core.step = step
        for _ in range(6):
            check(prompt, sampling, engine.submit(prompt, sampling).results(60))
        assert waited.count(0) > 0 and len(waited) > waited.count(0)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_beams_that_find_no_room_to_fork_are_computed_again(prefix_cache) -> None:
    prompt, sampling = PROMPTS[3], Sampling(24, beams=4, n=4, logprobs=2, ignore_eos=True)
    with fake_engine(prefix_cache=prefix_cache, max_step_tokens=17) as engine:
        engine._cache.fork = lambda parent, child, computed: False
        check(prompt, sampling, engine.submit(prompt, sampling).results(60), ends=())
        assert engine.stats().forks == 0 and (engine.stats().prefix_hits > 20) == prefix_cache
        engine._core.scheduler.check()


def test_beams_share_their_prompt_and_copy_one_block() -> None:
    prompt = RNG.integers(0, VOCAB, 100).tolist()
    with fake_engine() as engine:
        engine.submit(prompt, Sampling(12, beams=4, ignore_eos=True)).result(30)
        stats = engine.stats()
        assert stats.computed_tokens == 100 + 4 * 11  # the last token is chosen, not computed
        assert 3 <= stats.copied_blocks <= 3 * 12 and stats.preemptions == 0


def test_the_engines_next_requests_find_beams_tokens() -> None:
    with fake_engine(eos=ENDS) as engine:
        first = engine.submit(PROMPTS[3], Sampling(24, beams=3, ignore_eos=True)).result(30)
        again = engine.submit(PROMPTS[3] + first.token_ids, Sampling(2)).result(30)
        assert again.cached_tokens == 48 and first.cached_tokens == 0
        third = engine.submit(PROMPTS[3], FOUR).results(30)
        assert {c.cached_tokens for c in third} == {32}
        check(PROMPTS[3], FOUR, third)


def test_a_sample_has_one_event() -> None:
    with fake_engine(eos=ENDS, tokenizer=Letters()) as engine:
        request = engine.submit(PROMPTS[2], FOUR)
        events, completions = list(request), request.results()
        assert [(e.sample_index, e.token_id, e.text) for e in events] == [
            (i, None, c.text) for i, c in enumerate(completions)
        ]
        for e, c in zip(events, completions, strict=True):
            assert e.finish_reason == c.finish_reason
            assert c.text == "".join(chr(200 + t) for t in c.token_ids if t not in ENDS)
            assert c.timings.started_s <= c.timings.first_token_s <= c.timings.total_s


class Letters:
    """A tokenizer of one letter per token."""

    def detokenizer(self) -> Letters:
        return self

    def push(self, token_id: int) -> str:
        return chr(200 + token_id)

    def flush(self) -> str:
        return ""


def test_prompt_logprobs_and_no_new_tokens() -> None:
    with fake_engine(eos=ENDS, score_rows=3) as engine:
        scored = generate(engine, PROMPTS[3], max_new_tokens=24, beams=4, n=4, logprobs=2, prompt_logprobs=0)
        check(PROMPTS[3], FOUR, scored)
        assert all([s.token_id for s in c.prompt_logprobs[1:]] == PROMPTS[3][1:] for c in scored)
        for options in ({}, {"prompt_logprobs": 0}):
            none = generate(engine, PROMPTS[3], max_new_tokens=0, beams=4, n=2, **options)
            assert [(c.token_ids, c.score, c.finish_reason) for c in none] == [([], None, "length")] * 2


def test_a_full_context_ends_with_length() -> None:
    cut = Sampling(1000, beams=4, n=4, logprobs=2)
    with fake_engine(eos=ENDS, max_context=57) as engine:
        check(PROMPTS[3], FOUR, engine.submit(PROMPTS[3], cut).results(30))


@pytest.mark.parametrize("after", [0, 3])
def test_a_request_forks_from_a_finished_text_or_from_the_prompt(after) -> None:
    with fake_engine(eos=ENDS, max_context=2048, kv_blocks=600) as engine:
        parent = engine.submit(PROMPTS[3], Sampling(1500 if after else 24, beams=2, n=2, ignore_eos=True))
        while engine.stats().steps < after:
            time.sleep(0.001)
        texts = [] if after else [c.token_ids for c in parent.results(30)]
        known = PROMPTS[3] + (texts[1] if texts else [])
        child = parent.fork(FOUR, sample=1, append=[7, 8])
        check([*known, 7, 8], FOUR, child.results(30))
        greedy = parent.fork(Sampling(5, ignore_eos=True), sample=1).result(30)
        assert greedy.prompt_token_ids == known
        assert greedy.token_ids[0] == int(np.argmax(logits(tuple(known), (None,))))
        parent.cancel()
        check(PROMPTS[3], FOUR, engine.submit(PROMPTS[3], Sampling(9)).fork(FOUR, keep=0).results(30))
        with pytest.raises(RequestError, match="sample = 2"):
            parent.fork(sample=2)


@pytest.mark.parametrize("reason", ["cancelled", "timeout"])
def test_what_is_ended_keeps_the_best_so_far(reason) -> None:
    with fake_engine(eos=ENDS, max_context=4096, kv_blocks=900) as engine:
        sampling = Sampling(3000, beams=3, n=2, ignore_eos=True, logprobs=0)
        request = engine.submit(PROMPTS[3], sampling, timeout_s=1.0 if reason == "timeout" else None)
        other = engine.submit(PROMPTS[2], FOUR)
        check(PROMPTS[2], FOUR, other.results(30))
        if reason == "cancelled":
            request.cancel()
        found = request.results(30)
        assert [c.finish_reason for c in found] == [reason] * 2
        length = len(found[0].token_ids)
        assert 0 < length < 3000
        short = engine.submit(PROMPTS[3], replace(sampling, max_new_tokens=length)).results(30)
        assert [(c.token_ids, c.score, c.logprobs) for c in found] == [
            (c.token_ids, c.score, c.logprobs) for c in short
        ]
        assert engine.stats().blocks_used == [0]
        waiting = [engine.submit(PROMPTS[3], sampling) for _ in range(8)]
        for request in waiting:
            request.cancel()
        assert all(c.finish_reason == "cancelled" for r in waiting for c in r.results(30))


def test_nan_fails_its_request_alone() -> None:
    bad = wanted(tuple(PROMPTS[2]), FOUR)[0][0]
    safe = Sampling(4, beams=2, logprobs=2)
    broken = next(t for t in bad[3:] if all(t not in text for text, _ in wanted(tuple(PROMPTS[0]), safe)))
    with fake_engine(eos=ENDS) as engine:
        engine._executor.nan = broken
        request, other = engine.submit(PROMPTS[2], FOUR), engine.submit(PROMPTS[0], safe)
        with pytest.raises(EngineError, match="NaN"):
            request.results(30)
        engine._executor.nan = None
        assert len(other.results(30)) == 1
        check(PROMPTS[2], FOUR, engine.submit(PROMPTS[2], FOUR).results(30))
        assert engine.stats().failed_requests == 1 and engine.stats().blocks_used == [0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(temperature=0.5), "temperature"),
        (dict(top_k=3), "top_k"),
        (dict(top_p=0.5), "top_p"),
        (dict(min_p=0.5), "min_p"),
        (dict(stop="x"), "stop"),
        (dict(n=3), "n = 3"),
        (dict(beams=0), "beams"),
        (dict(beams=1001), "beams"),
        (dict(early_stopping="always"), "early_stopping"),
        (dict(early_stopping=1), "early_stopping"),
        (dict(length_penalty=11), "length_penalty"),
        (dict(beams=1, length_penalty=2.0), "length_penalty"),
        (dict(beams=1, early_stopping="never"), "early_stopping"),
        (dict(beams=17), "17 beams; this engine runs 16"),
        (dict(beams=16, stop_token_ids=tuple(range(82))), "16 beams and 82 end tokens"),
    ],
)
def test_what_does_not_go_together_is_refused(options, said) -> None:
    with fake_engine() as engine, pytest.raises(RequestError, match=said):
        engine.submit([1], Sampling(**{"beams": 2, "max_new_tokens": 4, **options}))
