"""A state machine over an engine: requests come, fork, are cancelled and run out of time in any order, in any
amount of memory, and each gives to the bit what it gives alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from runtime import Sampling
from runtime.completion import Completion, TokenLogprob
from runtime.engine import Engine
from runtime.errors import OctavoError, RequestError, ResourceError
from runtime.loop import Loop
from runtime.prefix import Prefix
from runtime.request import Request
from runtime.sequence import Sequence
from tests.runtime.drafters import OracleDrafter, RandomPace

MOST_TURNS = 20_000  # to finish all; a request that is not done by then has starved


class Alone(NamedTuple):
    """What a sample of a request gives that has the engine for itself."""

    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None
    score: float | None

    @staticmethod
    def of(completion: Completion) -> Alone:
        return Alone(
            completion.token_ids,
            completion.finish_reason,
            completion.logprobs,
            completion.prompt_logprobs,
            completion.score,
        )


Expect = Callable[[tuple[int, ...], Sampling], list[Alone]]  # prompt, sampling -> its samples


class Turns(Loop):
    """A loop without its thread: the test takes its turns."""

    def _run(self) -> None:
        pass

    def attend(self) -> bool:
        """Do what is asked for; False if there is nothing to do, nor to step."""
        return bool(self._calls or self._core.busy) and self._attend()

    def expire(self, request: Request) -> None:
        request.deadline_s = self._deadline_s = 0.0


def stepped(make: Callable[..., Engine], **options: Any) -> Engine:
    """An engine that does nothing but in `turn`."""
    with patch("runtime.engine.Loop", Turns):
        return make(**options)


indices = st.integers(0, 11)  # into lists of any length, modulo it
lengths = st.one_of(st.integers(1, 9), st.integers(8, 25), st.integers(20, 40))
services = st.fixed_dictionaries(
    {"priority": st.sampled_from((0, 0, 0, 1, -1)), "cache_salt": st.sampled_from(("", "", "", "other"))}
)
seeds = st.integers(0, 2)
samples = st.builds(
    Sampling,
    max_new_tokens=lengths,
    temperature=st.sampled_from((0.0, 0.7, 1.5)),
    top_k=st.sampled_from((0, 0, 7)),
    top_p=st.sampled_from((1.0, 1.0, 0.8)),
    min_p=st.sampled_from((0.0, 0.0, 0.05)),
    repetition_penalty=st.sampled_from((1.0, 1.0, 1.0, 1.4)),
    frequency_penalty=st.sampled_from((0.0, 0.0, 0.0, 0.7)),
    logit_bias=st.sampled_from(((), (), ((3, -2.0), (7, 4.0)))),
    seed=seeds,
    n=st.sampled_from((1, 1, 2, 3)),
    logprobs=st.sampled_from((None, 0, 2)),
    prompt_logprobs=st.sampled_from((None, None, None, 0, 1)),
    ignore_eos=st.booleans(),
    draft_tokens=st.sampled_from((None, None, None, 0, 1, 4, 30)),
)
scorings = st.builds(Sampling, max_new_tokens=st.just(0), prompt_logprobs=st.integers(0, 2), seed=seeds)
searches = st.builds(
    Sampling,
    max_new_tokens=st.integers(1, 24),
    beams=st.integers(2, 3),
    n=st.integers(1, 2),
    logprobs=st.sampled_from((None, 1)),
    prompt_logprobs=st.sampled_from((None, None, 0)),
    early_stopping=st.sampled_from((False, True, "never")),
    ignore_eos=st.booleans(),
    seed=seeds,
)
samplings = st.one_of(samples, samples, samples, samples, searches, scorings)


class EngineMachine(RuleBasedStateMachine):
    """Subclasses make the engine, and say how many places its host has.

    words: whole contexts that prompts are the beginnings of. injected: whether steps were made to fail.
    """

    places = 0
    drafter: OracleDrafter | None = None

    def __init__(self, totals: Counter[str], words: list[list[int]], expect: Expect) -> None:
        super().__init__()
        self.totals, self.words, self.expect = totals, words, expect
        self.made: list[tuple[Request, tuple[int, ...]]] = []
        self.pins: list[Prefix] = []
        self.injected = self.pinned = False

    def begin(self, engine: Engine) -> None:
        self.engine, self.loop, self.core = engine, engine._loop, engine._core

    def draft(self, by: str, seed: int, scribble: Callable[[Sequence, range], None] | None = None) -> None:
        """Have the engine, which was made with a drafter, draft otherwise, and by no clock."""
        speculation, rng = self.core.speculation, np.random.default_rng(seed)
        if speculation is None:
            return
        speculation._pace = RandomPace(rng, 8)
        if by not in ("own", "lookup"):
            fails = 3 if by == "broken" else 0
            vocab_size = self.engine.model.vocab_size
            self.drafter = OracleDrafter(self.coming, vocab_size, rng, fails=fails, scribble=scribble)
            speculation.drafter = self.drafter

    def coming(self, seq: Sequence) -> list[int]:
        """All that it will give."""
        return self.expect(tuple(seq.prompt.tolist()), seq.request.sampling)[seq.sample_index].token_ids

    @rule(word=indices, length=lengths, sampling=samplings, service=services)
    def submit(self, word, length, sampling, service):
        prompt = self.words[word % len(self.words)][:length]
        self.add(lambda: self.engine.submit(prompt, sampling, **service), prompt)

    @rule(
        length=st.integers(1, 20),
        count=st.integers(2, 5),
        temperature=st.sampled_from((0.0, 1.5)),
        service=services,
    )
    def crowd(self, length, count, temperature, service):
        """Several that grow side by side until there is no more room."""
        sampling = Sampling(30, temperature, seed=0, ignore_eos=True)
        for i in range(count):
            self.submit(i, length + i, sampling, service)
        self.turn(12)

    @precondition(lambda self: self.made)
    @rule(index=indices, sample=indices, keep=indices, more=st.integers(0, 9), sampling=samplings)
    def fork(self, index, sample, keep, more, sampling):
        """From any sample of any request, whatever has become of it; half of the time from its last token."""
        parent, _ = self.made[index % len(self.made)]
        sample %= parent.sampling.n
        known = parent.tokens(sample).tolist()
        output = len(known) - len(parent.sequences[sample].prompt)
        kept = None if keep % 2 else keep * output // 11
        tail = self.words[0][:more]
        prompt = known[: len(known) - output + (output if kept is None else kept)] + tail
        self.add(lambda: parent.fork(sampling, append=tail, sample=sample, keep=kept), prompt)
        self.totals["forked requests"] += 1

    @precondition(lambda self: self.made)
    @rule(index=indices)
    def cancel(self, index):
        self.made[index % len(self.made)][0].cancel()

    @precondition(lambda self: self.made)
    @rule(index=indices)
    def run_out_of_time(self, index):
        self.loop.expire(self.made[index % len(self.made)][0])

    @rule(word=indices, length=lengths)
    def pin(self, word, length):
        try:
            self.pins.append(self.engine.pin(self.words[word % len(self.words)][:length]))
            self.pinned = True
        except RequestError:
            self.totals["refused"] += 1

    @precondition(lambda self: self.pins)
    @rule(index=indices)
    def release(self, index):
        self.pins.pop(index % len(self.pins)).release()

    @precondition(lambda self: self.made or self.pins)
    @rule(turns=st.integers(1, 12))
    def turn(self, turns):
        for _ in range(turns):
            self.take_turn()

    @precondition(lambda self: self.made or self.pins)
    @rule(turns=st.integers(8, 25))
    def many_turns(self, turns):
        self.turn(turns)

    def add(self, submit: Callable[[], Request], prompt: list[int]) -> None:
        try:
            self.made.append((submit(), tuple(prompt)))
        except RequestError:
            self.totals["refused"] += 1

    def take_turn(self) -> bool:
        """One step, in which whoever is first goes on, unless it waits for its peers."""
        if not self.loop.attend():
            return False
        first = next(iter(self.core.scheduler.running), None)
        before = (first.computed, first.num_tokens) if first is not None else None
        steps = self.core.counters.steps
        self.core.step()
        self.core.scheduler.check()
        block = self.core.scheduler.cache.block
        for seq in self.core.scheduler.running:
            assert all(t.length <= seq.computed // block + 1 for t in seq.tables), "held for drafts of before"
        if first is not None and len(first.peers) == 1 and self.core.counters.steps > steps:
            assert first.finished or (first.computed, first.num_tokens) > before
        return True

    def teardown(self):
        if not hasattr(self, "engine"):
            return
        try:
            self.finish()
            self.totals.update(self.core.log.events)
            self.totals["samples"] += self.core.counters.finished_samples
            stats = self.engine.stats()
            self.totals["accepted"] += stats.accepted_tokens
            self.totals["rejected"] += stats.drafted_tokens - stats.accepted_tokens
        finally:
            self.engine.close()

    def finish(self) -> None:
        """Let all of it end, and compare. Nothing is held afterwards."""
        for prefix in self.pins:
            prefix.release()
        for _ in range(MOST_TURNS):
            if not self.take_turn():
                break
        for request, prompt in self.made:
            assert request.done, "a request starved"
            self.compare(request, prompt)
        stats = self.engine.stats()
        assert stats.blocks_used == [0] * len(stats.blocks_total)
        assert not self.core.scheduler.cache.prefixes.coming
        assert self.drafter is None or not self.drafter.known
        swap = self.core.scheduler.swap
        assert [len(free) for free in swap._free] == swap.places

    def compare(self, request: Request, prompt: tuple[int, ...]) -> None:
        """With what it gives alone, or with as much of that as there was time for."""
        if request._error is not None:
            assert isinstance(request._error, OctavoError)
            assert self.injected or (self.pinned and isinstance(request._error, RequestError | ResourceError))
            self.totals["failed requests"] += 1
            return
        expected = self.expect(prompt, request.sampling)
        for completion, alone in zip(request.results(), expected, strict=True):
            found = Alone.of(completion)
            if found.finish_reason in ("stop", "length"):
                assert found == alone
            elif request.sampling.beams == 1:
                assert found == cut(alone, found)
            events = [e for e in request._events if e.sample_index == completion.sample_index]
            if request.sampling.beams == 1:
                assert [e.token_id for e in events if e.token_id is not None] == found.token_ids


HAPPENS = (
    "prefix_hit", "fork", "copy_on_write", "evict", "preempt", "swap_out", "swap_in", "pin", "unpin",
    "cancelled", "timeout", "forked requests", "refused", "samples", "accepted", "rejected",
)  # fmt: skip


def one_of_each(machine: EngineMachine) -> None:
    """Everything that hypothesis may do, once, by name. The machine has started, with room for 12 blocks of 8
    tokens in each group, and with places on the host."""
    plain = dict(priority=0, cache_salt="")
    search = Sampling(6, beams=2, n=2, seed=0, logprobs=1)
    machine.pin(2, 24)
    machine.turn(3)
    machine.submit(2, 40, Sampling(9, 0.7, seed=1, n=3, logprobs=2, prompt_logprobs=1), plain)
    machine.submit(0, 47, Sampling(300, seed=0), plain)
    machine.many_turns(12)
    machine.fork(0, 0, 1, 3, Sampling(5, 1.5, top_k=7, seed=2))
    machine.cancel(-1)
    machine.release(0)
    machine.crowd(17, 4, 1.5, plain)
    machine.run_out_of_time(-1)
    machine.submit(1, 30, search, plain)
    machine.fork(2, 0, 2, 0, search)
    machine.many_turns(25)
    machine.teardown()


def cut(alone: Alone, found: Alone) -> Alone:
    """As much of each part as was found."""

    def part(whole: list[Any] | None, like: list[Any] | None) -> list[Any] | None:
        return None if whole is None or like is None else whole[: len(like)]

    return alone._replace(
        token_ids=alone.token_ids[: len(found.token_ids)],
        finish_reason=found.finish_reason,
        logprobs=part(alone.logprobs, found.logprobs),
        prompt_logprobs=part(alone.prompt_logprobs, found.prompt_logprobs),
    )


def prompts(vocab_size: int, context: int) -> list[list[int]]:
    """Contexts of which two share their first 21 tokens, and two none."""
    rng = np.random.default_rng(3)
    words = rng.integers(3, vocab_size, (3, context))
    words[1, :21] = words[0, :21]
    return words.tolist()
