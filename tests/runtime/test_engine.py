"""Every way of scheduling a request must give the tokens and log-probabilities that it gives alone."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest

from runtime import EngineError, RequestError, Sampling, generate, sampler
from tests.runtime.fake import VOCAB, fake_engine, reference

RNG = np.random.default_rng(7)
PROMPTS = [RNG.integers(0, VOCAB, size).tolist() for size in (1, 15, 16, 17, 40, 70, 33, 2)]
GREEDY = Sampling(max_new_tokens=20, logprobs=2)
SAMPLED = Sampling(max_new_tokens=20, temperature=0.9, top_k=40, top_p=0.95, seed=5, logprobs=2)


def outputs(completions):
    return [(c.token_ids, c.logprobs, c.prompt_logprobs, c.finish_reason) for c in completions]


def expected(prompt: list[int], sampling: Sampling, windows=(None,), sample_index: int = 0) -> list[int]:
    """Tokens by the model's definition, without a cache or an engine."""
    tokens = list(prompt)
    for _ in range(sampling.max_new_tokens):
        tokens.append(
            sampler.sample(
                reference(tokens, list(windows)),
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
                min_p=sampling.min_p,
                seed=sampling.seed or 0,
                sample_index=sample_index,
                position=len(tokens),
            )
        )
    return tokens[len(prompt) :]


@functools.cache
def alone(sampling: Sampling, windows=(None,)):
    with fake_engine(windows=windows, prefix_cache=False) as engine:
        return outputs([engine.submit(p, sampling).result() for p in PROMPTS])


@pytest.mark.parametrize("windows", [(None,), (20,), (None, 9)])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_tokens_are_the_models(sampling, windows):
    for prompt, (tokens, *_) in zip(PROMPTS, alone(sampling, windows), strict=True):
        assert tokens == expected(prompt, sampling, windows)


@pytest.mark.parametrize("windows", [(None,), (20,), (None, 9), (48, None, 17)])
@pytest.mark.parametrize(
    "options",
    [
        dict(),
        dict(max_step_tokens=1),
        dict(max_step_tokens=7),
        dict(max_step_tokens=16),
        dict(max_requests=3),
        dict(kv_blocks=9),
        dict(kv_blocks=9, max_step_tokens=7),
        dict(kv_blocks=9, prefix_cache=False),
    ],
    ids=str,
)
def test_a_request_does_not_depend_on_the_schedule(options, windows):
    with fake_engine(windows=windows, **options) as engine:
        for sampling in (GREEDY, SAMPLED):
            assert outputs(generate(engine, PROMPTS, sampling)) == alone(sampling, windows)
        engine._core.scheduler.check()
        stats = engine.stats()
        if options == {"kv_blocks": 9} and windows == (None,):
            assert stats.preemptions > 0
        assert stats.running == stats.waiting == 0 and stats.blocks_used == [0] * len(windows)
        assert 0 < stats.forward_s < stats.step_s


@pytest.mark.parametrize("windows", [(None,), (20,), (None, 9)])
def test_prefix_hits_change_nothing_and_skip_work(windows):
    with fake_engine(windows=windows) as engine:
        first = outputs(generate(engine, PROMPTS, SAMPLED))
        before = engine.stats()
        again = generate(engine, PROMPTS, SAMPLED)
        assert outputs(again) == first == alone(SAMPLED, windows)
        hits = engine.stats().prefix_hit_tokens - before.prefix_hit_tokens
        assert hits == sum((len(p) - 1) // 16 * 16 for p in PROMPTS) == sum(c.cached_tokens for c in again)


def test_a_second_turn_hits_the_first_turns_output():
    with fake_engine() as engine:
        prompt = PROMPTS[4]
        answer = engine.submit(prompt, Sampling(max_new_tokens=30)).result()
        longer = prompt + answer.token_ids + [3, 4, 5]
        second = engine.submit(longer, GREEDY).result()
        assert second.cached_tokens == (len(prompt) + 29) // 16 * 16  # its last token was never computed
    assert second.token_ids == expected(longer, GREEDY)


@pytest.mark.parametrize("size", [1, 15, 16, 17, 33])
@pytest.mark.parametrize(
    "options", [dict(), dict(kv_blocks=6), dict(max_requests=2), dict(prefix_cache=False)], ids=str
)
@pytest.mark.parametrize("windows", [(None,), (16, None)])
def test_samples_fork_from_one_prompt(size, options, windows):
    prompt = RNG.integers(0, VOCAB, size).tolist()
    sampling = Sampling(max_new_tokens=20, temperature=1.0, seed=11, n=4)
    with fake_engine(windows=windows, **options) as engine:
        completions = generate(engine, prompt, sampling)
        engine._core.scheduler.check()
        assert [c.sample_index for c in completions] == [0, 1, 2, 3]
        for i, completion in enumerate(completions):
            assert completion.token_ids == expected(prompt, sampling, windows, sample_index=i)
        assert len({tuple(c.token_ids) for c in completions}) == 4
        if not options and size == 17 and len(windows) == 1:
            stats = engine.stats()
            assert stats.copied_blocks == 3 and stats.computed_tokens == 17 + 4 * 19
        if not options and size == 33:
            assert completions[1].cached_tokens == 33


@pytest.mark.parametrize(
    "options", [dict(), dict(max_step_tokens=5), dict(score_rows=4), dict(kv_blocks=7)], ids=str
)
def test_prompt_logprobs(options):
    sampling = Sampling(max_new_tokens=3, prompt_logprobs=2, logprobs=1)
    with fake_engine(**options) as engine:
        generate(engine, PROMPTS, max_new_tokens=1)  # fills the prefix cache, which must not hide rows
        for prompt, completion in zip(PROMPTS, generate(engine, PROMPTS, sampling), strict=True):
            scores = completion.prompt_logprobs
            assert scores[0] is None and [s.token_id for s in scores[1:]] == prompt[1:]
            for i, score in enumerate(scores[1:], 1):
                row = sampler.log_softmax(reference(prompt[:i], [None]))
                assert score.logprob == pytest.approx(row[prompt[i]], abs=1e-5)
                best = sorted(range(VOCAB), key=lambda t: -row[t])[:2]
                assert [t for t, _ in score.top] == best
            assert completion.token_ids == expected(prompt, sampling)


def test_scoring_alone_samples_nothing():
    with fake_engine() as engine:
        completions = generate(engine, PROMPTS, max_new_tokens=0, prompt_logprobs=0, n=2)
        assert len(completions) == 2 * len(PROMPTS)
        for completion, prompt in zip(completions[::2], PROMPTS, strict=True):
            assert completion.token_ids == [] and completion.finish_reason == "length"
            assert len(completion.prompt_logprobs) == len(prompt)
        assert engine.stats().computed_tokens == sum(len(p) - 1 for p in PROMPTS)
        assert generate(engine, [1, 2], max_new_tokens=0)[0].token_ids == []


def test_a_full_context_ends_with_length():
    with fake_engine(max_context=40) as engine:
        completion = engine.submit(PROMPTS[3], Sampling(max_new_tokens=1000)).result()
        assert len(completion.token_ids) == 40 - 17 and completion.finish_reason == "length"
        full = engine.submit(list(range(40)), Sampling()).result()
        assert full.token_ids == [] and full.finish_reason == "length"


def test_end_tokens_stop():
    prompt, tokens = PROMPTS[4], expected(PROMPTS[4], GREEDY)
    with fake_engine(eos=(tokens[5],)) as engine:
        stopped = engine.submit(prompt, GREEDY).result()
        cut = tokens[: tokens.index(tokens[5]) + 1]
        assert stopped.token_ids == cut and stopped.finish_reason == "stop"
        ignoring = Sampling(max_new_tokens=20, ignore_eos=True)
        assert engine.submit(prompt, ignoring).result().token_ids == tokens
        also = Sampling(max_new_tokens=20, ignore_eos=True, stop_token_ids=(tokens[2],))
        assert engine.submit(prompt, also).result().token_ids == tokens[: tokens.index(tokens[2]) + 1]


@pytest.mark.parametrize(
    ("prompt", "sampling", "said"),
    [
        ([], GREEDY, "no tokens"),
        ([1, VOCAB], GREEDY, "token 1 is 97"),
        ([-1], GREEDY, "token 0 is -1"),
        ([1.5], GREEDY, "token 0 is 1.5"),
        ([True], GREEDY, "token 0 is True"),
        ([1] * 257, GREEDY, "257 tokens; the context holds 256"),
        ([1] * 100, Sampling(max_new_tokens=100), "need a KV cache of 199 tokens"),
        ("text", GREEDY, "no tokenizer"),
        ([{"role": "user", "content": "x"}], GREEDY, "no tokenizer"),
        ([1], Sampling(stop=("x",)), "need a tokenizer"),
        ([1], Sampling(logprobs=98), "logprobs = 98"),
    ],
)
def test_what_cannot_be_served_is_refused_at_submit(prompt, sampling, said):
    with fake_engine(kv_blocks=12) as engine:
        with pytest.raises(RequestError, match=said):
            engine.submit(prompt, sampling)
        assert engine.submit([1], GREEDY).result().token_ids == expected([1], GREEDY)


def test_a_seed_is_drawn_and_reported():
    with fake_engine() as engine:
        first, second = (engine.submit([5], Sampling(temperature=1.0)).result() for _ in range(2))
        assert first.seed != second.seed
        again = engine.submit([5], Sampling(temperature=1.0, seed=first.seed)).result()
        assert again.token_ids == first.token_ids != second.token_ids


def test_events_make_up_the_completion():
    with fake_engine() as engine:
        request = engine.submit(PROMPTS[4], GREEDY)
        events = list(request)
        assert [e.token_id for e in events] == request.result().token_ids == [e.token_id for e in request]
        assert [e.finish_reason for e in events] == [None] * 19 + ["length"]
        assert [e.logprob for e in events] == request.result().logprobs
        merged = list(generate(engine, PROMPTS, GREEDY, stream=True))
        for i, (tokens, *_) in enumerate(alone(GREEDY)):
            assert [e.token_id for e in merged if e.prompt_index == i] == tokens


def test_leaving_a_stream_early_cancels():
    with fake_engine() as engine:
        stream = generate(engine, PROMPTS[:2], Sampling(max_new_tokens=150), stream=True)
        next(stream)
        stream.close()
        assert engine.submit([1], GREEDY).result().token_ids == expected([1], GREEDY)
        assert engine.stats().output_tokens < 300


def test_cancel_ends_one_request_alone():
    with fake_engine(max_context=2048, kv_blocks=256) as engine:
        victim = engine.submit(PROMPTS[0], Sampling(max_new_tokens=2000, n=2))
        other = engine.submit(PROMPTS[4], GREEDY)
        next(iter(victim))
        victim.cancel()
        for completion in victim.results(timeout_s=10):
            assert completion.finish_reason == "cancelled" and len(completion.token_ids) < 2000
        assert other.result().token_ids == expected(PROMPTS[4], GREEDY)
        victim.cancel()  # of a finished one: nothing
        assert engine.stats().blocks_used == [0]


def test_requests_can_be_awaited():
    async def main(engine):
        one, two = engine.submit(PROMPTS[4], GREEDY), engine.submit(PROMPTS[5], GREEDY)
        streamed = [event.token_id async for event in two]
        return (await one).token_ids, streamed

    with fake_engine() as engine:
        assert asyncio.run(main(engine)) == tuple(expected(p, GREEDY) for p in PROMPTS[4:6])


def test_many_threads_submit():
    results = {}

    def work(i):
        results[i] = engine.submit(PROMPTS[i], SAMPLED).result().token_ids

    with fake_engine() as engine:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [results[i] for i in range(len(PROMPTS))] == [tokens for tokens, *_ in alone(SAMPLED)]


def test_a_failed_step_fails_its_requests_and_no_others():
    with fake_engine() as engine:
        engine._executor.fail = EngineError("octavo_forward failed with code 3")
        with pytest.raises(EngineError, match="code 3"):
            engine.submit(PROMPTS[4], GREEDY).result()
        engine._executor.fail = None
        assert engine.submit(PROMPTS[4], GREEDY).result().token_ids == expected(PROMPTS[4], GREEDY)
        assert engine.stats().failed_requests == 1 and engine.stats().blocks_used == [0]


@pytest.mark.parametrize("score", [None, 0, 1])
def test_nan_fails_its_request_alone(score):
    sampling = Sampling(max_new_tokens=20, prompt_logprobs=score)
    tokens = expected(PROMPTS[5], GREEDY)
    with fake_engine() as engine:
        engine._executor.nan = tokens[3] if score is None else PROMPTS[5][30]
        requests = [engine.submit(p, sampling) for p in PROMPTS]
        with pytest.raises(EngineError, match="NaN"):
            requests[5].result()
        for prompt, request in zip(PROMPTS, requests, strict=True):
            wanted = expected(prompt, GREEDY)
            computed = prompt if score is not None else prompt[-1:]
            if engine._executor.nan not in computed + wanted[:-1]:
                assert request.result().token_ids == wanted
        assert sum(r.done and r._error is None for r in requests) >= 1
    assert engine.stats().blocks_used == [0]


def test_close_fails_what_is_open_and_refuses_more():
    engine = fake_engine(max_context=4096, kv_blocks=256)
    request = engine.submit([1], Sampling(max_new_tokens=4000))
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        request.result(timeout_s=5)
    with pytest.raises(EngineError, match="closed"):
        engine.submit([1])
    assert engine._executor.closed


@pytest.mark.parametrize("where", ["step", "cancel"])
def test_whoever_waits_hears_of_it_when_the_engine_breaks_down(where):
    def broken(*_):
        raise SystemError("a fault")

    with fake_engine() as engine:
        requests = [engine.submit(PROMPTS[4], Sampling(max_new_tokens=200)) for _ in range(3)]
        next(iter(requests[0]))
        if where == "step":
            engine._core.scheduler.remove = engine._core.scheduler.schedule = broken
        else:
            engine._core.fail = engine._core.cancel = broken
            requests[1].cancel()
        for request in requests:
            with pytest.raises(EngineError, match="broke down"):
                request.result(timeout_s=10)
        for _ in range(3):
            with pytest.raises(EngineError, match="broke down") as caught:
                engine.submit([1])
        assert len(caught.traceback) < 6  # of this call alone


def test_an_idle_engine_keeps_no_request():
    with fake_engine() as engine:
        requests = [engine.submit(p, Sampling(max_new_tokens=3, logprobs=2)) for p in PROMPTS]
        for request in requests:
            request.result()
        kept = [weakref.ref(request) for request in requests]
        del requests, request
        deadline = time.monotonic() + 10
        while any(ref() for ref in kept) and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        assert not any(ref() for ref in kept)


def test_a_watcher_that_leaves_or_exits_hides_nothing_from_the_next():
    with fake_engine() as engine:
        request = engine.submit(PROMPTS[0], Sampling(max_new_tokens=50))
        told = []

        def leave():
            if request.done:
                request.unwatch(leave)
            if threading.current_thread().name == "octavo-engine":
                raise SystemExit

        request.watch(leave)
        request.watch(lambda: told.append(request.done))
        request.result(timeout_s=10)
        assert told[-1]


@pytest.mark.parametrize("timeout_s", [1e12, float("inf")])
def test_one_can_wait_for_as_long_as_one_likes(timeout_s):
    with fake_engine() as engine:
        assert engine.submit([1], Sampling(max_new_tokens=60)).result(timeout_s).finish_reason == "length"


def test_many_threads_close():
    engine = fake_engine()
    inside, worst = [], []

    def close() -> None:
        inside.append(1)
        worst.append(len(inside))
        time.sleep(0.01)
        inside.pop()

    engine._executor.close = close
    threads = [threading.Thread(target=engine.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=5)
    assert worst == [1] * 4  # the executor is used by one thread at a time


def test_a_fork_of_the_process_is_refused_and_can_exit():
    with fake_engine() as engine:
        request = engine.submit([1], Sampling(max_new_tokens=2))
        request.result()
        child = os.fork()
        if child == 0:
            signal.alarm(5)  # instead of hanging
            engine._loop._wake = None  # its lock may be held for ever
            try:
                engine.submit([1])
            except EngineError as error:
                request.cancel()
                engine.close()
                os._exit("after the fork" not in str(error))
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_an_error_while_cancelling_fails_that_request_alone():
    class Broken:
        def push(self, token_id: int) -> str:
            return ""

        def flush(self) -> str:
            raise ValueError("cannot decode")

    class Tokens:
        def detokenizer(self) -> Broken:
            return Broken()

    with fake_engine(tokenizer=Tokens(), max_context=4096, kv_blocks=256) as engine:
        request = engine.submit([1], Sampling(max_new_tokens=4000))
        next(iter(request))
        request.cancel()
        with pytest.raises(ValueError, match="cannot decode"):
            request.result(timeout_s=5)
        engine.tokenizer = None
        assert engine.submit([1], Sampling(max_new_tokens=2)).result(timeout_s=5).finish_reason == "length"


def test_result_of_several_samples_is_refused():
    with fake_engine() as engine:
        request = engine.submit([1], Sampling(n=2, max_new_tokens=2))
        assert len(request.results()) == 2
        with pytest.raises(RequestError, match="results"):
            request.result()


@pytest.mark.parametrize(
    ("prompts", "seed", "said"),
    [
        ([], None, "none"),
        (None, None, "prompts: None is no prompt"),
        (b"text", None, "b'text' is no prompt"),
        ({"role": "user", "content": "x"}, None, "is no prompt"),
        ([[1], None], None, "prompt 1: None is no prompt"),
        ([[1], [2]], [1], "1 seeds for 2"),
        ([[1], []], None, "prompt 1"),
        (np.array(5), None, "is no prompt"),
        (bytearray(b"text"), None, "is no prompt"),
        ([[1], [2]], np.array([1, 2, 3]), "3 seeds for 2"),
    ],
)
def test_generate_refuses_before_anything_runs(prompts, seed, said):
    with fake_engine() as engine:
        with pytest.raises(RequestError, match=said):
            generate(engine, prompts, seed=seed)
        assert engine.stats().steps == 0


def test_several_texts_are_no_prompt():
    with fake_engine() as engine, pytest.raises(RequestError, match="give them to runtime.generate"):
        engine.submit(["one", "two"])


@pytest.mark.parametrize("sampling", ["greedy", {}, 5, [None], [Sampling(), 3]])
def test_what_is_no_sampling_is_refused(sampling):
    with fake_engine() as engine, pytest.raises(RequestError, match="sampling"):
        generate(engine, [[1], [2]][: len(sampling) if isinstance(sampling, list) else 2], sampling)


@pytest.mark.parametrize("option", [{"stop": 5}, {"stop_token_ids": 5}, {"stop": {"a": 1}}])
def test_wrong_shorthand_is_refused_by_name(option):
    with fake_engine() as engine, pytest.raises(RequestError, match=next(iter(option))):
        generate(engine, [1], **option)


def test_arrays_are_token_ids():
    with fake_engine() as engine:
        array = np.array(PROMPTS[4], np.int64)
        for prompts in (array, [array], np.stack([array])):
            assert generate(engine, prompts, GREEDY)[0].token_ids == expected(PROMPTS[4], GREEDY)


def test_one_seed_per_prompt():
    with fake_engine() as engine:
        both = generate(engine, [PROMPTS[4]] * 3, temperature=1.0, seed=[1, 2, 1], max_new_tokens=20)
        assert [c.seed for c in both] == [1, 2, 1]
        assert both[0].token_ids == both[2].token_ids != both[1].token_ids
