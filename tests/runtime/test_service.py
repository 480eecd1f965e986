"""Priorities, timeouts, clients that leave: they change when tokens come, never which; and nobody starves."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from runtime import EngineError, RequestError, Sampling, generate
from runtime.service import LEAD, Service
from tests.runtime.fake import VOCAB, fake_engine

RNG = np.random.default_rng(5)


def words(size: int) -> list[int]:
    return RNG.integers(0, VOCAB, size).tolist()


class Gate:
    """Holds an engine back in its first step, of a request of its own, until it is opened: all that comes
    meanwhile comes at once. Records the requests of each step."""

    def __init__(self, engine) -> None:
        self.opened, self.entered, self.held = threading.Event(), threading.Event(), threading.Event()
        self.hold_after: int | None = None  # a request: once a step had it, it is held again
        self.steps: list[list[int]] = []  # request numbers in each step
        schedule = engine._core.scheduler.schedule

        def held(wanted=None):
            self.entered.set()
            if self.steps and self.hold_after in self.steps[-1]:
                self.hold_after = None
                self.opened.clear()
                self.held.set()
            self.opened.wait(10)
            chunks = schedule(wanted)
            self.steps.append([chunk.seq.owner[0] for chunk in chunks])
            return chunks

        engine._core.scheduler.schedule = held
        engine.submit([1], Sampling(max_new_tokens=1))
        self.entered.wait(10)


def finished(requests) -> list[int]:
    """Numbers in the order in which the requests finished."""
    for request in requests:
        request.result(timeout_s=10)
    return [r.number for r in sorted(requests, key=lambda r: r.submitted_s + r.result().timings.total_s)]


def test_a_higher_priority_is_served_first():
    with fake_engine(max_requests=1) as engine:
        gate = Gate(engine)
        requests = [engine.submit(words(5), Sampling(max_new_tokens=2), priority=p) for p in (0, 2, 1, 2, -1)]
        gate.opened.set()
        assert finished(requests) == [2, 4, 3, 1, 5]


def test_a_level_of_priority_overtakes_so_many_and_no_more():
    with fake_engine(max_requests=1, kv_blocks=8) as engine:
        gate = Gate(engine)
        low = engine.submit(words(3), Sampling(max_new_tokens=1))
        high = [engine.submit(words(3), Sampling(max_new_tokens=1), priority=2) for _ in range(2 * LEAD + 10)]
        gate.opened.set()
        assert finished([low, *high]).index(low.number) == 2 * LEAD - 1


def test_what_decodes_goes_on_beside_an_older_prompt():
    with fake_engine(max_step_tokens=8, max_context=256) as engine:
        gate = Gate(engine)
        short = engine.submit(words(3), Sampling(max_new_tokens=60))
        gate.hold_after = short.number
        gate.opened.set()
        gate.held.wait(10)
        long = engine.submit(words(120), Sampling(max_new_tokens=1), priority=3)
        gate.opened.set()
        long.result(timeout_s=10), short.result(timeout_s=10)
        together = [step for step in gate.steps if long.number in step]
        assert len(together) == 18 and all(short.number in step for step in together)  # 120 / (8 - 1)


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_a_request_out_of_time_ends_with_what_it_has(state):
    slow = Sampling(max_new_tokens=4000)
    with fake_engine(max_context=4096, kv_blocks=400, max_requests=1 if state == "waiting" else 4) as engine:
        other = engine.submit(words(3), slow)
        next(iter(other))
        request = engine.submit(words(3), slow, timeout_s=0.2)
        completion = request.result(timeout_s=10)
        assert completion.finish_reason == "timeout"
        assert 0.2 <= completion.timings.total_s < 5
        assert bool(completion.token_ids) == (state == "running")
        assert not other.done
        other.cancel()
        other.result()
        kinds = [(entry.kind, entry.request) for entry in engine.log()]
        assert ("timeout", request.number) in kinds and ("cancelled", other.number) in kinds
        assert engine.stats().blocks_used == [0]


def test_timeouts_are_those_of_each_prompt():
    with fake_engine() as engine:
        completions = generate(engine, [words(4)] * 2, max_new_tokens=3, timeout_s=60.0)
        assert [c.finish_reason for c in completions] == ["length"] * 2
        assert engine._loop._deadline_s > time.monotonic()
        engine.submit([1], Sampling(max_new_tokens=1)).result()
        assert engine._loop._deadline_s == float("inf")


def test_a_client_that_leaves_cancels_nobody_else():
    with fake_engine(max_context=4096, kv_blocks=400) as engine:
        other = engine.submit(words(3), Sampling(max_new_tokens=40))
        with engine.submit(words(3), Sampling(max_new_tokens=4000)) as request:
            next(iter(request))
        assert request.result(timeout_s=10).finish_reason == "cancelled"
        assert other.result(timeout_s=10).finish_reason == "length"


def test_a_task_that_is_cancelled_ends_its_request():
    async def client(engine, begun: asyncio.Event):
        async with engine.submit(words(3), Sampling(max_new_tokens=4000)) as request:
            clients.append(request)
            async for _ in request:
                begun.set()

    async def main(engine):
        begun = asyncio.Event()
        task = asyncio.create_task(client(engine, begun))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    clients: list = []
    with fake_engine(max_context=4096, kv_blocks=400) as engine:
        asyncio.run(main(engine))
        assert clients[0].result(timeout_s=10).finish_reason == "cancelled"


def test_a_request_that_can_never_go_on_fails_alone():
    with fake_engine(kv_blocks=4) as engine:
        engine._check = lambda *_: None  # a fault in the accounting
        other = engine.submit(words(5), Sampling(max_new_tokens=40))
        for size in (100, 60):  # never admitted; preempted by itself when it has grown
            with pytest.raises(EngineError, match="cannot go on"):
                engine.submit(words(size), Sampling(max_new_tokens=20)).result(timeout_s=10)
        assert len(other.result(timeout_s=10).token_ids) == 40
        assert engine.stats().blocks_used == [0] and engine.stats().failed_requests == 2


def test_all_samples_can_be_awaited():
    async def main(engine):
        return await engine.submit(words(9), Sampling(5, temperature=1.0, seed=1, n=3)).all()

    with fake_engine() as engine:
        assert [c.sample_index for c in asyncio.run(main(engine))] == [0, 1, 2]


@pytest.mark.parametrize(
    "options",
    [
        dict(priority=1.5),
        dict(priority=True),
        dict(priority=10**9),
        dict(timeout_s=0),
        dict(timeout_s=float("nan")),
        dict(timeout_s=float("inf")),
        dict(timeout_s="1"),
        dict(cache_salt=b"x"),
    ],
    ids=str,
)
def test_wrong_values_are_refused_by_name(options):
    with pytest.raises(RequestError, match=next(iter(options))):
        Service(**options)
    with fake_engine() as engine, pytest.raises(RequestError, match=next(iter(options))):
        generate(engine, [1], **options)
