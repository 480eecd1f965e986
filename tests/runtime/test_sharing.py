"""Forks of requests, pinned prefixes, and prefixes shared by requests that come at once."""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import pytest

from runtime import RequestError, ResourceError, Sampling, sampler
from tests.runtime.fake import BLOCK, VOCAB, fake_engine, reference

RNG = np.random.default_rng(11)


def words(size: int) -> list[int]:
    return RNG.integers(0, VOCAB, size).tolist()


def expected(prompt: list[int], sampling: Sampling, seed: int, windows=(None,)) -> list[int]:
    """Tokens by the model's definition."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + sampling.max_new_tokens:
        row = reference(tokens, list(windows))
        tokens.append(sampler.sample(row, temperature=sampling.temperature, seed=seed, position=len(tokens)))
    return tokens[len(prompt) :]


def count(engine, kind: str) -> int:
    return sum(entry.kind == kind for entry in engine.log())


def idle(engine) -> None:
    """Wait until the engine has done all that it was asked to, and check its invariants. It tells so itself,
    between two steps: seen from here it may be in the middle of one."""
    told: SimpleQueue[bool] = SimpleQueue()
    busy = True
    while busy:
        engine._loop.ask(lambda _: told.put(engine._core.busy), None)
        busy = told.get(timeout=10)
    engine._core.scheduler.check()


@pytest.mark.parametrize("windows", [(20,), (None, 9)])
@pytest.mark.parametrize("keep", [None, 0, 3])
@pytest.mark.parametrize("append", [[], list(range(40))], ids=len)
def test_a_fork_gives_what_its_tokens_give_alone(windows, keep, append):
    with fake_engine(windows=windows, max_context=512, kv_blocks=64) as engine:
        parent = engine.submit(words(45), Sampling(max_new_tokens=60, temperature=1.0, seed=1))
        stream = iter(parent)
        for _ in range(20):
            next(stream)
        child = parent.fork(Sampling(6, temperature=0.9, seed=4), append=append, keep=keep)
        result = child.result()
        known = len(result.prompt_token_ids) - len(append)
        assert known == 45 + keep if keep is not None else known >= 65
        assert result.prompt_token_ids == parent.tokens().tolist()[:known] + append
        assert result.token_ids == expected(result.prompt_token_ids, child.sampling, 4, windows)
        parent.cancel()
        idle(engine)
        assert engine.stats().blocks_used == [0] * len(windows)


def test_a_fork_of_a_running_request_computes_nothing_twice_and_copies_one_block_of_each_group():
    with fake_engine(windows=(None, 60), max_context=512, kv_blocks=64) as engine:
        parent = engine.submit(words(100), Sampling(max_new_tokens=80))
        stream = iter(parent)
        for _ in range(30):
            next(stream)
        before = engine.stats().computed_tokens
        child = parent.fork(Sampling(max_new_tokens=1))
        result = child.result()
        parent.cancel()
        idle(engine)
        assert result.cached_tokens == len(result.prompt_token_ids) - 1
        assert count(engine, "fork") == 1 and count(engine, "copy_on_write") <= 2
        emitted = len(parent.results()[0].token_ids)
        assert engine.stats().computed_tokens - before <= emitted - 30 + 2 + 1


def test_a_fork_of_a_finished_request_hits_its_prefix():
    with fake_engine() as engine:
        parent = engine.submit(words(40), Sampling(max_new_tokens=30))
        answer = parent.result()
        child = parent.fork(append=[1, 2, 3])
        assert child.sampling.n == 1 and child.seed != parent.seed
        assert child.result().cached_tokens == (40 + 29) // BLOCK * BLOCK
        assert child.result().prompt_token_ids == answer.prompt_token_ids + answer.token_ids + [1, 2, 3]


def test_forks_of_forks_and_of_samples():
    with fake_engine(kv_blocks=24) as engine:
        parent = engine.submit(words(33), Sampling(max_new_tokens=24, temperature=1.0, seed=3, n=3))
        leaves = []
        for sample, completion in enumerate(parent.results()):
            child = parent.fork(Sampling(8, temperature=1.0, seed=5), sample=sample, keep=10)
            assert child.result().prompt_token_ids[33:] == completion.token_ids[:10]
            leaves.append(child.fork(Sampling(8, temperature=1.0, seed=6), append=[7]))
        for leaf in leaves:
            result = leaf.result()
            assert result.token_ids == expected(result.prompt_token_ids, Sampling(8, temperature=1.0), 6)
        idle(engine)
        assert engine.stats().blocks_used == [0]


@pytest.mark.parametrize("kv_blocks", [6, 7])
def test_a_fork_that_lacks_a_block_to_copy_to_starts_anew(kv_blocks):
    with fake_engine(kv_blocks=kv_blocks) as engine:
        parent = engine.submit(words(60), Sampling(max_new_tokens=30))
        for _, event in zip(range(10), parent, strict=False):
            assert event.finish_reason is None
        with engine._loop._wake:  # what follows is taken up at once
            child = parent.fork(Sampling(max_new_tokens=1), keep=3, append=words(33))
            parent.cancel()
        result = child.result()
        assert result.token_ids == expected(result.prompt_token_ids, child.sampling, 0)
        # Of the fork all tokens; after it had to start anew none, or the three blocks that the parent sealed.
        assert result.cached_tokens in (0, 48, 63)
        idle(engine)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(sample=1), "sample = 1"),
        (dict(sample="0"), "sample = '0'"),
        (dict(keep=99), "keep = 99"),
        (dict(keep=1.5), "keep = 1.5"),
        (dict(append=[VOCAB]), "token 0 is 97"),
        (dict(append=None), "append: None is no prompt"),
        (dict(append="a"), "append: this artifact has no tokenizer"),
        (dict(append=[dict(role="user", content="a")]), "messages begin a conversation"),
        (dict(append=[1] * 250), "the context holds"),
        (dict(sampling={"n": 1}), "sampling = {'n': 1}"),
        (dict(timeout_s=10**400), "timeout_s = 1000"),
    ],
)
def test_a_fork_that_cannot_be_is_refused(options, said):
    with fake_engine() as engine:
        parent = engine.submit(words(5), Sampling(max_new_tokens=4))
        parent.result()
        with pytest.raises(RequestError, match=said):
            parent.fork(**options)


def test_requests_that_come_at_once_share_the_prefix_that_the_first_computes():
    system = words(160)
    prompts = [system + words(9) for _ in range(12)]
    with fake_engine(max_step_tokens=1024, kv_blocks=200, max_context=256) as engine:
        held = []
        forward = engine._executor.forward
        engine._executor.forward = lambda step: held.append(engine.stats().blocks_used[0]) or forward(step)
        requests = [engine.submit(prompt, Sampling(max_new_tokens=6)) for prompt in prompts]
        tokens = [request.result().token_ids for request in requests]
        assert tokens[7] == expected(prompts[7], Sampling(max_new_tokens=6), 0)
        assert max(held) <= 10 + 12  # the prefix once, and a block of its own for each
        assert engine.stats().computed_tokens == 160 + 12 * (9 + 5)


def test_salts_keep_prefixes_apart():
    prompt = words(64)
    with fake_engine() as engine:
        cached = [
            engine.submit(prompt, Sampling(max_new_tokens=1), cache_salt=salt).result().cached_tokens
            for salt in ("", "a", "b", "a", "", "é\ud800")
        ]
    assert cached == [0, 0, 0, 48, 48, 0]


@pytest.mark.parametrize("windows", [(None,), (40,), (None, 20)])
def test_a_pinned_prefix_outlives_whatever_comes(windows):
    system = words(70)
    with fake_engine(windows=windows, kv_blocks=16) as engine:
        with engine.pin(system) as prefix:
            assert prefix.num_tokens == 64 and prefix.ready
            idle(engine)
            for _ in range(6):  # more than the pool holds
                engine.submit(words(100), Sampling(max_new_tokens=20)).result()
            assert engine.stats().evicted_blocks > 0
            again = engine.submit(system + [5], Sampling(max_new_tokens=8)).result()
            assert again.cached_tokens == 64
            assert again.token_ids == expected(system + [5], Sampling(max_new_tokens=8), 0, windows)
        prefix.release()
        idle(engine)
        assert engine.stats().blocks_used == engine.stats().blocks_pinned == [0] * len(windows)


def test_a_prefix_that_is_cached_already_is_pinned_as_it_is():
    system = words(64)
    with fake_engine(kv_blocks=16) as engine:
        engine.submit(system + [1], Sampling(max_new_tokens=1)).result()
        with engine.pin(system), engine.pin(system):
            idle(engine)
            assert engine.stats().blocks_used == [4] and engine.stats().computed_tokens <= 65 + 2 * 16
            for _ in range(6):
                engine.submit(words(60), Sampling(max_new_tokens=20)).result()
            assert engine.submit(system + [9], Sampling(max_new_tokens=1)).result().cached_tokens == 64


def test_prefixes_that_share_blocks_promise_them_once():
    system = words(64)
    with fake_engine(kv_blocks=10) as engine:
        with (
            engine.pin(system),
            engine.pin(system),
            engine.pin(system[:32]),
            engine.pin(system[:32] + words(16)),
        ):
            assert engine.stats().blocks_pinned == [5]
            assert engine.stats().blocks_used == [5]
        with engine.pin(system), engine.pin(system, cache_salt="other"):
            assert engine.stats().blocks_pinned == [8]


def test_what_a_pinned_prefix_leaves_is_what_requests_may_need():
    system = words(64)
    with fake_engine(kv_blocks=10) as engine, engine.pin(system):
        with pytest.raises(RequestError, match="some of them pinned"):
            engine.submit(words(60), Sampling(max_new_tokens=38))
        sharing = engine.submit(system + words(40), Sampling(max_new_tokens=50))
        assert len(sharing.result().token_ids) == 50
        assert len(engine.submit(words(60), Sampling(max_new_tokens=36)).result().token_ids) == 36


@pytest.mark.parametrize("kv_blocks", [9, 10, 11, 12])
def test_a_prompt_that_is_a_pinned_prefix_can_be_served_or_is_refused(kv_blocks):
    """Its last token must be computed, for which a window lacks what came before."""
    system, one = words(96), Sampling(max_new_tokens=1)
    with fake_engine(kv_blocks=kv_blocks, windows=(None, 20)) as engine, engine.pin(system):
        if kv_blocks < 12:
            with pytest.raises(RequestError, match="some of them pinned"):
                engine.submit(system, one)
        else:
            engine.submit(words(90), one).result()
            assert engine.submit(system, one).result(10).token_ids == expected(system, one, 0, (None, 20))
        assert engine.submit([*system, 1], one).result(10).cached_tokens == 96


def test_a_prefix_is_not_pinned_at_the_cost_of_what_is_open():
    with fake_engine(kv_blocks=10, max_context=256) as engine:
        running = engine.submit(words(60), Sampling(max_new_tokens=90))
        with pytest.raises(ResourceError, match="leaves too little"):
            engine.pin(words(64)).wait()
        assert len(running.result().token_ids) == 90
        with engine.pin(words(64)):
            pass
        idle(engine)
        assert engine.stats().blocks_used == [0]


@pytest.mark.parametrize(
    ("size", "options", "said"),
    [
        (15, {}, "15 tokens fill no block: nothing can be pinned. Give at least 16,"),
        (40, dict(prefix_cache=False), "nothing can be pinned. Load it with prefix_cache=True"),
    ],
)
def test_what_cannot_be_pinned_is_refused(size, options, said):
    with fake_engine(**options) as engine, pytest.raises(RequestError, match=said):
        engine.pin(words(size))


def test_an_interrupt_while_a_prefix_is_awaited_lets_it_go(monkeypatch):
    with fake_engine() as engine:
        prefix = engine.pin(words(40))
        monkeypatch.setattr(prefix, "wait", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt), prefix:
            pass
        idle(engine)
        assert engine.stats().blocks_pinned == engine.stats().blocks_used == [0]


def test_letting_go_of_a_prefix_that_is_not_computed_yet():
    with fake_engine(max_step_tokens=1, max_context=256) as engine:
        prefix = engine.pin(words(200))
        prefix.release()
        idle(engine)
        assert engine.stats().blocks_used == engine.stats().blocks_pinned == [0]
