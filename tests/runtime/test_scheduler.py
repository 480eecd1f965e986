"""What the scheduler does in cases that matter, by name."""

from __future__ import annotations

import numpy as np

from runtime import Sampling, sampler
from runtime.core import Core
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.swap import Swap
from runtime.limits import Limits
from runtime.output import Output
from runtime.request import Request
from runtime.scheduler import Scheduler
from runtime.sequence import Sequence
from runtime.step import StepBuffers
from tests.runtime.fake import BLOCK, VOCAB, FakeExecutor, reference

CONTEXT = 96
WORDS = np.random.default_rng(3).integers(0, VOCAB, (3, CONTEXT)).tolist()  # prompts share long prefixes

MACHINE = dict(
    windows=(None,), spare_blocks=8, budget=64, max_requests=4, score_rows=8, prefix_cache=False, places=0
)


def build(m) -> Core:
    counts = [Group(0, w).most_blocks(84, m["budget"], BLOCK) + m["spare_blocks"] for w in m["windows"]]
    groups = [Group(count, w) for count, w in zip(counts, m["windows"], strict=True)]
    limits = Limits(m["budget"], m["max_requests"], m["score_rows"])
    executor, cache = FakeExecutor(counts, list(m["windows"])), Cache(groups, prefix_cache=m["prefix_cache"])
    scheduler = Scheduler(cache, limits, Swap(cache, m["places"]))
    return Core(executor, scheduler, StepBuffers(limits, len(groups), CONTEXT, BLOCK))


def make(number: int, r) -> Request:
    prompt = np.array(WORDS[r["word"]][: r["length"]], np.int32)
    scores = 1 if r["score"] else None
    sampling = Sampling(r["new"], temperature=1.0, seed=number, n=r["n"], prompt_logprobs=scores)
    sequences = [
        Sequence(
            (number, number, i), prompt, r["new"], CONTEXT, Output(None, ()), score=r["score"] and i == 0
        )
        for i in range(r["n"])
    ]
    return Request(sampling, number, sequences, frozenset(), None, number=number)


def check(number, completion, r, windows):
    """Tokens by the model's definition; a cancelled request may have fewer."""
    tokens = list(WORDS[r["word"]][: r["length"]])
    for token in completion.token_ids:
        row = reference(tokens, windows)
        options = dict(temperature=1.0, seed=number, sample_index=completion.sample_index)
        assert token == sampler.sample(row, position=len(tokens), **options)
        tokens.append(token)
    if completion.finish_reason != "cancelled":
        assert len(completion.token_ids) == min(r["new"], CONTEXT - r["length"])
        if r["score"]:
            assert [s and s.token_id for s in completion.prompt_logprobs][1:] == tokens[1 : r["length"]]


def test_decodes_go_on_while_a_long_prompt_is_computed():
    core = build(MACHINE | dict(budget=8))
    common = dict(word=0, n=1, score=False)
    short, long = make(0, dict(length=4, new=20, **common)), make(1, dict(length=60, new=4, **common))
    core.add(short)
    core.step()
    core.add(long)
    for _ in range(6):
        known = short.sequences[0].num_tokens
        core.step()
        assert short.sequences[0].num_tokens == known + 1
    assert long.sequences[0].computed == 6 * 7


def test_equal_prompts_share_blocks_while_they_run():
    core = build(MACHINE | dict(prefix_cache=True))
    same = dict(word=0, length=50, new=20, n=1, score=False)
    first, second = make(0, same), make(1, same)
    core.add(first)
    core.step()
    core.add(second)
    core.step()
    tables = [r.sequences[0].tables[0].live() for r in (first, second)]
    assert tables[0][:3] == tables[1][:3] and tables[0][3] != tables[1][3]
    assert second.sequences[0].cached_tokens == 48


CROWD = [dict(word=w, length=size, new=new, n=1, score=False) for w, size, new in ((0, 40, 38), (1, 17, 24))]


def crowded(places: int) -> tuple[Core, list[Request]]:
    """Two requests that need 8 blocks together where there are 6."""
    core = build(MACHINE | dict(spare_blocks=0, places=places))
    added = [make(number, each) for number, each in enumerate(CROWD)]
    for request in added:
        core.add(request)
    return core, added


def test_what_the_host_kept_is_not_computed_again():
    computed, swapped = [], []
    for places in (40, 1, 0):
        core, added = crowded(places)
        while core.busy:
            core.step()
            core.scheduler.check()
        for number, (request, each) in enumerate(zip(added, CROWD, strict=True)):
            for completion in request.results():
                check(number, completion, each, [None])
        assert core.log.events["preempt"] == 1
        computed.append(core.counters.computed_tokens)
        swapped.append(core.log.amounts["swap_out"])
    assert computed[0] == 40 + 37 + 17 + 23 < computed[1] == computed[2]
    assert swapped == [2, 0, 0]


def test_a_cancelled_sequence_gives_its_places_back():
    core, (_, second) = crowded(3)
    while not core.log.events["preempt"]:
        core.step()
    assert core.scheduler.swap.holds(second.sequences[0]) and len(core.scheduler.swap._free[0]) == 1
    core.cancel(second)
    core.scheduler.check()
    assert len(core.scheduler.swap._free[0]) == 3


def test_what_the_host_holds_gives_way_to_sharing_with_a_pinned_prefix():
    core = build(MACHINE | dict(prefix_cache=True, spare_blocks=0, places=20))  # 6 blocks
    wanted = dict(word=0, length=40, new=44, n=1, score=False)
    request, prefix = make(0, wanted), make(1, dict(wanted, length=32, new=0))
    core.add(request)
    while request.sequences[0].num_tokens < 70:
        core.step()
    core.scheduler._preempt(request.sequences[0], "a test")
    core.add(other := make(2, dict(wanted, word=1, length=80, new=4)))  # evicts what it held
    core.scheduler._waiting.reverse()  # is computed first
    while not other.done:
        core.step()
    (seq,) = prefix.sequences
    seq.order, seq.kept = (-1, 1, 0), True
    core.pin(prefix)
    while core.busy:
        core.step()
        core.scheduler.check()
    assert seq in core.scheduler.kept and core.log.amounts["swap_out"] == 5
    check(0, request.result(), wanted, [None])


def test_those_who_left_the_queue_leave_its_memory():
    core, _ = crowded(0)
    core.step()
    for number in range(2, 500):
        core.add(late := make(number, CROWD[1]))
        core.cancel(late)
    assert len(core.scheduler._waiting) <= 64
