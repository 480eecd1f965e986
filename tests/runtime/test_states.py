"""States of recurrences in the KV cache: a request keeps the block that its next token goes on from, and of a
prompt the blocks that prefix hits go on from."""

from __future__ import annotations

import numpy as np
import pytest

from runtime import RequestError, Sampling
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.swap import Swap
from runtime.output import Output
from runtime.sequence import Sequence
from tests.runtime.fake import VOCAB, fake_engine
from tests.runtime.test_sharing import count, expected, idle

RNG = np.random.default_rng(12)


def words(size: int) -> list[int]:
    return RNG.integers(0, VOCAB, size).tolist()


def sequence(tokens: list[int], more: int = 64) -> Sequence:
    prompt = np.array(tokens, np.int32)
    return Sequence((0, 0, 0), prompt, more, len(tokens) + more, Output(None, ()))


def compute(cache: Cache, seq: Sequence, tokens: int) -> list[int]:
    """A step up to so many tokens: the state's table while it runs."""
    assert cache.extend(seq, tokens)
    cache.keep_hits(seq, tokens)
    ids = seq.tables[-1].ids[: seq.tables[-1].length].tolist()
    cache.advance(seq, tokens)
    cache.check([seq])
    return ids


@pytest.mark.parametrize("block", [8, 32, 64])
@pytest.mark.parametrize("beside", [[], [Group(20)], [Group(20, 9), Group(20, tail=True)]], ids=len)
def test_a_chunk_leaves_what_is_read_later(block, beside):
    cache = Cache([*beside, Group(3, state=True)], block=block)
    seq = sequence(words(7 * block))
    assert cache.admit(seq, 7 * block)
    held = compute(cache, seq, 4 * block + 1)
    assert [entry >= 0 for entry in held] == [False] * 4 + [True]
    held = compute(cache, seq, 7 * block)  # that before the last is where a hit of the same prompt ends
    assert [entry >= 0 for entry in held[4:]] == [True, True, True]
    assert seq.tables[-1].live() == [held[6]]
    cache.free(seq)
    again = sequence([*seq.prompt])
    assert cache.admit(again, 7 * block) and again.computed == 6 * block
    assert again.tables[-1].live() == [held[5]]


def test_a_hit_is_kept_where_there_is_room_alone():
    cache = Cache([Group(2, state=True)], block=8)
    seq = sequence(words(40))
    assert cache.admit(seq, 40)
    assert [entry >= 0 for entry in compute(cache, seq, 17)] == [False, False, True]
    assert [entry >= 0 for entry in compute(cache, seq, 40)[2:]] == [True, False, True]
    without = Cache([Group(9, state=True)], block=8, prefix_cache=False)
    seq = sequence(words(40))
    assert without.admit(seq, 40)
    assert [entry >= 0 for entry in compute(without, seq, 40)] == [False] * 4 + [True]


@pytest.mark.parametrize("known", [15, 16, 17, 24])
@pytest.mark.parametrize("drafts", [1, 7, 8, 9, 25])
def test_no_block_is_left_out_that_is_read_after_drafts(known, drafts):
    """However many of them are right: and what is beyond is given back, and computed anew."""
    for right in range(drafts + 1):
        cache = Cache([Group(9, state=True)], block=8)
        seq = sequence(words(known))
        assert cache.admit(seq, 64)
        compute(cache, seq, known - 1)
        assert cache.extend(seq, known) and cache.extend(seq, known + drafts)
        seq.ids[known : known + drafts] = 1
        cache.advance(seq, known + right)
        cache.trim(seq)
        table = seq.tables[0]
        assert table.first == (known + right - 1) // 8 and table.ids[table.first] >= 0
        assert table.length <= (known + right) // 8 + 1 and -1 not in table.ids[table.first : table.length]
        for _ in range(right + 1):
            seq.append(1)
        compute(cache, seq, seq.num_tokens)


def test_two_blocks_are_enough_for_any_request():
    sampling = Sampling(max_new_tokens=100, temperature=1.0, seed=1, ignore_eos=True)
    for step_tokens in (1, 16, 64):
        with fake_engine(windows=("state",), kv_blocks=2, max_step_tokens=step_tokens) as engine:
            prompt = words(120)
            assert engine.submit(prompt, sampling).result().token_ids == expected(
                prompt, sampling, 1, ("state",)
            )
    with fake_engine(windows=("state",), kv_blocks=1) as engine, pytest.raises(RequestError, match="1 block"):
        engine.submit(words(17), sampling)


@pytest.mark.parametrize("windows", [("state",), (None, "state"), ("state", 20)])
@pytest.mark.parametrize("size", [9, 40])
@pytest.mark.parametrize("step_tokens", [1024, 64])
def test_requests_that_come_at_once_share_the_prefix_that_the_first_computes(windows, size, step_tokens):
    system, sampling = words(160), Sampling(max_new_tokens=6)
    prompts = [system + words(size) for _ in range(12)]
    options = dict(max_step_tokens=step_tokens, kv_blocks=200, max_context=256)
    with fake_engine(windows=windows, **options) as engine:
        with engine._loop._wake:  # all of them are taken up at once
            requests = [engine.submit(prompt, sampling) for prompt in prompts]
        tokens = [request.result().token_ids for request in requests]
        assert tokens[7] == expected(prompts[7], sampling, 0, windows)
        assert engine.stats().computed_tokens == 160 + 12 * (size + 5)


@pytest.mark.parametrize("windows", [("state",), (None, "state")])
def test_what_two_prompts_have_in_common_the_third_hits(windows):
    """Where it ends is known when the second comes, whose state is then kept there."""
    system, one = words(75), Sampling(max_new_tokens=1)
    with fake_engine(windows=windows, max_step_tokens=1024) as engine:
        cached = [engine.submit(system + words(60), one).result().cached_tokens for _ in range(4)]
        assert cached == [0, 0, 64, 64]
        prompt = words(50)
        cached = [engine.submit(prompt, one).result().cached_tokens for _ in range(2)]
        assert cached == [0, 48]


def test_a_conversation_goes_on_from_its_last_full_block():
    with fake_engine(windows=(None, "state")) as engine:
        answer = engine.submit(prompt := words(40), Sampling(max_new_tokens=30, ignore_eos=True)).result()
        again = engine.submit([*prompt, *answer.token_ids, 1, 2, 3], Sampling(max_new_tokens=5)).result()
    assert again.cached_tokens == 64  # of 69 that were computed


def test_nobody_waits_for_what_there_is_no_room_to_keep():
    system, sampling = words(64), Sampling(max_new_tokens=20)
    prompts = [system + words(40) for _ in range(6)]
    with fake_engine(windows=("state",), kv_blocks=3, max_requests=6) as engine:
        with engine._loop._wake:
            requests = [engine.submit(prompt, sampling) for prompt in prompts]
        for prompt, request in zip(prompts, requests, strict=True):
            assert request.result(60).token_ids == expected(prompt, sampling, 0, ("state",))
        idle(engine)
        assert engine.stats().blocks_used == [0]


def test_a_preempted_request_has_one_block_on_the_host():
    cache = Cache([Group(20), Group(4, state=True)], block=8)
    swap = Swap(cache, 9, most_single=2)
    assert swap.places == [9, 2]
    seq = sequence(words(50))
    assert cache.admit(seq, 50)
    compute(cache, seq, 50)
    assert swap.hold(seq) and [len(free) for free in swap._free] == [2, 1]
    assert swap.restore(seq, 50, []) and seq.tables[1].first == 6 == seq.tables[1].length - 1
    swap.check()
    cache.check([seq])


@pytest.mark.parametrize("windows", [("state",), (None, "state")])
def test_forks_and_samples_copy_a_state_on_write(windows):
    with fake_engine(windows=windows, max_context=512) as engine:
        sampling = Sampling(20, temperature=1.0, seed=3, n=3, ignore_eos=True)
        parent = engine.submit(prompt := words(45), sampling)
        for i, completion in enumerate(parent.results()):
            alone = engine.submit(prompt, Sampling(20, temperature=1.0, seed=3, n=3, ignore_eos=True))
            assert alone.results()[i].token_ids == completion.token_ids
        assert count(engine, "copy_on_write") >= 2 * len(windows)
        assert parent.results()[0].token_ids == expected(prompt, sampling, 3, windows)


@pytest.mark.parametrize(("beams", "fits"), [(3, True), (4, False)])
def test_beams_need_three_blocks_each(beams, fits):
    with fake_engine(windows=("state",), kv_blocks=9) as engine:
        sampling = Sampling(60, beams=beams, ignore_eos=True)
        if not fits:
            with pytest.raises(RequestError, match="for each of 4 beams"):
                engine.submit(words(40), sampling)
            return
        assert len(engine.submit(words(40), sampling).result(60).token_ids) == 60
