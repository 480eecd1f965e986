"""A short soak: random clients and injected faults leave nothing behind, and change nobody's output."""

from __future__ import annotations

import pytest

from pagingbench import soak
from pagingbench.clients import Sizes
from pagingbench.faults import Faults, FaultyTokenizer, Injected, install
from runtime.engine import Engine
from runtime.errors import EngineError
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.swap import Swap
from runtime.limits import Limits
from runtime.manifest import Model
from runtime.sampling import Sampling
from tests.runtime import test_scheduler as scheduling
from tests.runtime.fake import VOCAB, FakeExecutor, fake_engine

WINDOWS = (None, 20)
FAULTS = {"forward", "nan", "sample", "extend", "admit"}  # that happen within a second or two, and
EVENTS = {"preempt", "swap_out", "fork", "prefix_hit", "cancelled"}
SIZES = Sizes(prompt=40, new=12, system=33)


def small_engine(blocks: int, places: int) -> Engine:
    cache = Cache([Group(blocks, window) for window in WINDOWS])
    executor = FakeExecutor([blocks] * len(WINDOWS), list(WINDOWS))
    limits = Limits(max_step_tokens=24, max_requests=6)
    return Engine(executor, Model("f32", VOCAB, 96, None, (3,)), cache, limits, swap=Swap(cache, places))


def spoil(executor, logits, row):
    executor._logits[row] = float("nan")


def test_faults_and_clients_that_leave_change_nothing_for_others():
    rates = {kind: 0.02 for kind in ("forward", "nan", "sample", "logprobs", "copy", "swap_out", "swap_in")}
    faults = Faults(1, rates)
    with (
        small_engine(8, 6) as engine,
        fake_engine(windows=WINDOWS, prefix_cache=False, max_context=96, eos=(3,)) as alone,
    ):
        install(engine, faults, spoil)

        def enough() -> bool:
            return FAULTS <= set(faults.counts) and EVENTS <= set(engine._core.log.events)

        found = soak.soak(engine, alone, faults, 2.0, 1.0, SIZES, 1, 12, hung_s=60.0, enough=enough)
        assert enough(), (faults.counts, engine._core.log.events)
    assert found.holds, found.json


def test_who_waits_for_a_copy_that_failed_in_anothers_step_is_computed_again():
    core = scheduling.build(scheduling.MACHINE | dict(places=8))
    wanted = [dict(word=w, length=20, new=12, n=1, score=False) for w in (0, 1)]
    failing, waiting = added = [scheduling.make(number, each) for number, each in enumerate(wanted)]
    for request in added:
        core.add(request)
    core.step()

    def half_a_copy(group, pairs):
        for _, block in pairs.tolist():
            core.executor.pools[group][block] = 7
        raise EngineError("no copy")

    seq, extend, swap_in = waiting.sequences[0], core.scheduler.cache.extend, core.executor.swap_in
    core.scheduler._preempt(seq, "it is to come back")
    core.scheduler.cache.extend = lambda other, tokens: other is not seq and extend(other, tokens)
    core.executor.swap_in = half_a_copy
    core.step()
    core.scheduler.cache.extend, core.executor.swap_in = extend, swap_in
    assert failing.done and core.log.events["swap_in"] == 1 and not waiting.done
    while core.busy:
        core.step()
        core.scheduler.check()
    scheduling.check(1, waiting.result(), wanted[1], [None])


class Silent:
    """A tokenizer whose tokens have no text."""

    def detokenizer(self):
        return self

    def push(self, token_id):
        return ""

    def flush(self):
        return ""


@pytest.mark.parametrize("new, scores", [(0, 0), (0, None), (3, None), (60, None)])
def test_a_detokenizer_that_fails_at_the_end_fails_its_request_alone(new, scores):
    faults = Faults(0, {"flush": 1.0})
    with fake_engine(tokenizer=FaultyTokenizer(Silent(), faults)) as engine:
        request = engine.submit([1, 2, 3], Sampling(max_new_tokens=new, prompt_logprobs=scores))
        if new > 3:
            request.cancel()
        with pytest.raises(Injected):
            request.results(20)
        faults.active = False
        assert len(engine.submit([1, 2, 3], Sampling(max_new_tokens=2)).result(20).token_ids) == 2
        assert engine.stats().blocks_used == [0]


def test_a_watcher_that_fails_harms_nobody():
    with fake_engine() as engine:
        watched, other = (engine.submit([1, token], Sampling(max_new_tokens=30)) for token in (2, 3))
        calls = []

        def watcher():
            calls.append(1)
            if len(calls) > 1:
                raise ValueError("a fault of the watcher's")

        watched.watch(watcher)
        assert len(watched.result(20).token_ids) == len(other.result(20).token_ids) == 30
