"""Drafts change how many tokens a step gives, and nothing else, wherever in a draft something happens.

Schedules of all kinds are in test_schedules.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from runtime import EngineError, RequestError, Sampling, sampler
from runtime.completion import Completion
from runtime.engine import Engine
from runtime.sequence import Sequence
from runtime.speculation.confidence import Confidence
from runtime.speculation.pace import Pace
from tests.runtime.fake import BLOCK, VOCAB, fake_engine, reference
from tests.runtime.schedules import stepped

PROMPT = np.random.default_rng(5).integers(0, VOCAB, 13).tolist()
GREEDY = Sampling(max_new_tokens=24, logprobs=2, seed=0)
SAMPLED = Sampling(max_new_tokens=24, temperature=0.9, top_p=0.95, seed=5, logprobs=2)


class Script:
    """Proposes what a function says. calls: how many drafts were wanted, call by call."""

    name = "script"
    setup_s = 0.0

    def __init__(self, propose: Callable[[Sequence, int], list[int]]) -> None:
        self._propose = propose
        self.calls: list[list[int]] = []
        self.settled = self.forgotten = 0

    def draft(self, chunks, wanted):
        self.calls.append(list(wanted))
        return [self._write(chunk.seq, most) for chunk, most in zip(chunks, wanted, strict=True)]

    def _write(self, seq: Sequence, most: int) -> int:
        found = self._propose(seq, most)
        seq.ids[seq.num_tokens : seq.num_tokens + len(found)] = found
        return len(found)

    def settle(self, seq: Sequence) -> None:
        self.settled += 1

    def forget(self, seq: Sequence) -> None:
        self.forgotten += 1

    def close(self) -> None:
        pass


def says(tokens: list[int]) -> Script:
    """What follows PROMPT."""
    return Script(lambda seq, most: tokens[seq.num_tokens - len(PROMPT) :][:most])


def never(tokens: list[int]) -> Script:
    """Always another token than comes."""
    return Script(lambda seq, most: [(t + 1) % VOCAB for t in tokens[seq.num_tokens - len(PROMPT) :][:most]])


def run(engine: Engine, sampling: Sampling, prompt: list[int] = PROMPT) -> Completion:
    return engine.submit(prompt, sampling).result(timeout_s=60)


def alone(sampling: Sampling, **options) -> Completion:
    with fake_engine(**options) as engine:
        return run(engine, sampling)


def same(found: Completion, expected: Completion) -> None:
    assert replace(found, timings=None, draft=None, cached_tokens=0) == replace(
        expected, timings=None, draft=None, cached_tokens=0
    )


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_right_drafts_are_all_taken(sampling):
    expected = alone(sampling)
    drafter = says(expected.token_ids)
    with fake_engine(drafter=drafter) as engine:
        found, stats = run(engine, replace(sampling, draft_tokens=4)), engine.stats()
    same(found, expected)
    # The prompt gives one token, then 5 a step: 21 in four, and the last 3 in one that drafts two.
    assert drafter.calls == [[4], [4], [4], [4], [2]]
    assert stats.steps == 6 and stats.verify_steps == drafter.settled == 5
    assert stats.computed_tokens == len(PROMPT) + 4 * 5 + 3
    assert (stats.drafted_tokens, stats.accepted_tokens) == (18, 18)
    assert stats.draft_positions == ((5, 5), (5, 5), (4, 4), (4, 4))
    assert (found.draft.drafted, found.draft.accepted) == (18, 18)
    assert found.draft.by_position == stats.draft_positions
    assert stats.draft_s > 0 and stats.drafter == "script" and stats.draft_failures == 0
    assert "18 of 18 accepted (100%) in 5 steps" in str(stats)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_wrong_drafts_are_none_of_the_output(sampling):
    expected = alone(sampling)
    with fake_engine(drafter=never(expected.token_ids)) as engine:
        found, stats = run(engine, replace(sampling, draft_tokens=3)), engine.stats()
    same(found, expected)
    assert stats.steps == 24 and stats.accepted_tokens == 0
    assert stats.drafted_tokens == 20 * 3 + 2 + 1  # the last step has no room, the two before for 1 and 2
    assert found.draft.by_position == ((22, 0), (21, 0), (20, 0))


def test_a_draft_counts_up_to_the_first_that_is_wrong():
    expected = alone(GREEDY)

    def propose(seq: Sequence, most: int) -> list[int]:
        found = expected.token_ids[seq.num_tokens - len(PROMPT) :][:most]
        return [t if i != 2 else (t + 1) % VOCAB for i, t in enumerate(found)]

    with fake_engine(drafter=Script(propose)) as engine:
        found, stats = run(engine, replace(GREEDY, draft_tokens=5)), engine.stats()
    same(found, expected)
    # Three tokens a step, of which two were drafts.
    assert stats.draft_positions[:3] == ((8, 8), (7, 7), (7, 0))
    assert sum(a for _, a in stats.draft_positions[3:]) == 0


def test_a_request_that_wants_no_drafts_gets_none():
    drafter = says(alone(GREEDY).token_ids)
    with fake_engine(drafter=drafter) as engine:
        found = run(engine, replace(GREEDY, draft_tokens=0))
        run(engine, Sampling(max_new_tokens=0, prompt_logprobs=1, draft_tokens=3))
        run(engine, Sampling(max_new_tokens=6, beams=3, draft_tokens=3))
    assert drafter.calls == [] and found.draft is None


def test_drafts_end_with_the_context():
    expected = alone(GREEDY, max_context=30)
    drafter = says(expected.token_ids)
    with fake_engine(drafter=drafter, max_context=30) as engine:
        same(run(engine, replace(GREEDY, draft_tokens=50)), expected)
    assert drafter.calls == [[15]] and expected.finish_reason == "length"  # 17 in all: one before, one after


@pytest.mark.parametrize("at", range(6))
def test_an_end_token_inside_a_draft_ends_it(at):
    tokens = alone(GREEDY).token_ids
    sampling = replace(GREEDY, stop_token_ids=(tokens[at],))
    with fake_engine(drafter=says(tokens)) as engine:
        request = engine.submit(PROMPT, replace(sampling, draft_tokens=5))
        found = request.result(timeout_s=60)
        same(found, alone(sampling))
        assert (
            [e.token_id for e in request._events] == found.token_ids == tokens[: tokens.index(tokens[at]) + 1]
        )
        assert engine.stats().blocks_used == [0]


class Letters:
    """A tokenizer whose token ids are letters."""

    def detokenizer(self):
        return self

    def push(self, token_id: int) -> str:
        return chr(ord("a") + token_id % 26)

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("at", range(1, 7))
def test_a_stop_text_inside_a_draft_ends_it(at):
    tokens = alone(GREEDY).token_ids
    letters = "".join(map(Letters().push, tokens))
    sampling = replace(GREEDY, stop=(letters[at : at + 2],))
    expected = alone(sampling, tokenizer=Letters())
    with fake_engine(drafter=says(tokens), tokenizer=Letters()) as engine:
        request = engine.submit(PROMPT, replace(sampling, draft_tokens=6))
        same(request.result(timeout_s=60), expected)
        assert (
            "".join(e.text for e in request._events)
            == expected.text
            == letters[: letters.index(sampling.stop[0])]
        )


def test_a_draft_that_makes_a_nan_harms_nobody():
    """A wrong draft may be a token for which the model computes NaN, whose row nobody asked for."""
    expected = alone(GREEDY)
    poison = next(t for t in range(VOCAB) if t not in expected.token_ids + PROMPT)

    def propose(seq: Sequence, most: int) -> list[int]:
        right = expected.token_ids[seq.num_tokens - len(PROMPT) :][:most]
        return [*right[:2], poison, *right[3:]][:most]

    with fake_engine(drafter=Script(propose)) as engine:
        engine._executor.nan = poison
        found, stats = run(engine, replace(GREEDY, draft_tokens=4)), engine.stats()
    same(found, expected)
    assert stats.failed_requests == 0 and stats.accepted_tokens == 23 - 8  # two in each step


@pytest.mark.parametrize("at", range(1, 6))
def test_a_nan_of_its_own_fails_a_request_after_the_tokens_before(at):
    tokens = alone(GREEDY).token_ids

    def given(sampling: Sampling, **options) -> list[int]:
        with fake_engine(**options) as engine:
            engine._executor.nan = tokens[at]
            request = engine.submit(PROMPT, sampling)
            other = engine.submit(PROMPT[:3], replace(sampling, max_new_tokens=2))
            with pytest.raises(EngineError, match="NaN"):
                request.result(timeout_s=60)
            assert len(other.result(timeout_s=60).token_ids) == 2
            return [e.token_id for e in request._events]

    first = tokens.index(tokens[at])
    assert given(GREEDY) == tokens[: first + 1]
    assert given(replace(GREEDY, draft_tokens=4), drafter=says(tokens)) == tokens[: first + 1]


def broken(seq: Sequence, most: int) -> list[int]:
    raise RuntimeError("a drafter's own fault")


def test_a_drafter_that_fails_costs_no_request_anything_and_is_given_up():
    drafter = Script(broken)
    with fake_engine(drafter=drafter) as engine:
        same(run(engine, replace(GREEDY, draft_tokens=4)), alone(GREEDY))
        stats, log = engine.stats(), [entry for entry in engine.log() if entry.kind == "draft_failed"]
    assert len(drafter.calls) == stats.draft_failures == len(log) == 3
    assert stats.draft_stopped == "a drafter's own fault" and "it was stopped: a drafter's" in str(stats)
    assert str(log[0]).endswith("request 0, sample 0: draft_failed: a drafter's own fault")
    assert stats.failed_requests == stats.drafted_tokens == 0


def test_what_is_asked_of_a_draft_may_fail_as_the_drafter_may(monkeypatch):
    tokens = alone(GREEDY).token_ids
    drafter = says(tokens)
    drafter.confidence = Confidence()
    monkeypatch.setattr(Pace, "least_chance", lambda self, samples, requests: 1 / 0)
    with fake_engine(drafter=drafter) as engine:
        same(run(engine, replace(GREEDY, draft_tokens=4)), alone(GREEDY))
        stats = engine.stats()
    assert stats.draft_failures == 3 and stats.failed_requests == 0 and not drafter.calls


def test_a_drafter_that_fails_now_and_then_goes_on():
    tokens, calls = alone(GREEDY).token_ids, Counter()

    def propose(seq: Sequence, most: int) -> list[int]:
        calls["all"] += 1
        return broken(seq, most) if calls["all"] % 3 else tokens[seq.num_tokens - len(PROMPT) :][:most]

    with fake_engine(drafter=Script(propose)) as engine:
        same(run(engine, replace(GREEDY, draft_tokens=2)), alone(GREEDY))
        stats = engine.stats()
    assert stats.draft_failures > 3 and stats.draft_stopped is None and stats.accepted_tokens > 0


@pytest.mark.parametrize("count", [-1, 5])
def test_wrong_counts_are_a_failure(count):
    drafter = Script(lambda seq, most: [])
    drafter._write = lambda seq, most: count
    with fake_engine(drafter=drafter) as engine:
        same(run(engine, replace(GREEDY, draft_tokens=4)), alone(GREEDY))
        assert "drafts where 4 were wanted" in engine.stats().draft_stopped


@pytest.mark.parametrize("token_id", [-1, VOCAB, 2**31 - 1])
def test_drafts_that_are_no_tokens_are_cut_off(token_id):
    tokens = alone(GREEDY).token_ids

    def propose(seq: Sequence, most: int) -> list[int]:
        return [*tokens[seq.num_tokens - len(PROMPT) :][: most - 1], token_id][:most]

    with fake_engine(drafter=Script(propose)) as engine:
        same(run(engine, replace(GREEDY, draft_tokens=3)), alone(GREEDY))
        stats = engine.stats()
    assert stats.draft_failures == 0 and stats.accepted_tokens == stats.drafted_tokens > 10


def test_drafts_take_no_block_from_anybody():
    """Wrong ones, where blocks are few: preemptions are those that come without, in the same steps."""
    prompts = [[i] * (2 * BLOCK - 2) for i in range(2)]
    sampling = Sampling(max_new_tokens=50, seed=0)
    with fake_engine(prefix_cache=False) as engine:
        tokens = [run(engine, sampling, prompt).token_ids for prompt in prompts]

    def propose(seq: Sequence, most: int) -> list[int]:
        known = tokens[seq.owner[0]][seq.num_tokens - seq.prompt_tokens :][:most]
        return [(token_id + 1) % VOCAB for token_id in known]

    def happens(draft_tokens: int) -> list[tuple]:
        drafter = Script(propose)
        with stepped(fake_engine, kv_blocks=8, drafter=drafter) as engine:
            requests = [engine.submit(p, replace(sampling, draft_tokens=draft_tokens)) for p in prompts]
            while engine._loop.attend():
                engine._core.step()
                running = engine._core.scheduler.running
                assert all(seq.tables[0].length <= seq.computed // BLOCK + 1 for seq in running)
            assert [r.result().token_ids for r in requests] == tokens
            wanted.extend(most for call in drafter.calls for most in call)
            steps = (engine.stats().steps, engine.stats().draft_failures)
            return [steps, *((e.kind, e.request, e.amount) for e in engine.log())]

    wanted: list[int] = []
    plain = happens(0)
    assert wanted == [] and [kind for kind, *_ in plain].count("preempt") == 1
    assert happens(20) == plain and 5 < len({most for most in wanted if most < 20})


def test_all_else_comes_before_drafts():
    """Of a step's 8 tokens three decode, a prompt takes what these leave of them, and drafts the rest."""
    drafter = Script(lambda seq, most: [0] * most)
    sampling = Sampling(max_new_tokens=30, ignore_eos=True, draft_tokens=4)
    engine = stepped(fake_engine, drafter=drafter, max_step_tokens=8, prefix_cache=False)
    with engine:
        for i in range(3):
            engine.submit([i], sampling)
        for _ in range(2):
            engine._loop.attend(), engine._core.step()
        assert drafter.calls[-1] == [4, 1]
        calls = len(drafter.calls)
        engine.submit(PROMPT, sampling)
        steps = []
        for _ in range(4):
            engine._loop.attend(), engine._core.step()
            steps.append(engine._core.executor.steps[-1])
        assert steps[:2] == [(8, 4), (8, 4)]  # 3 that decode, and 5 of the prompt's 13
        assert drafter.calls[calls:] == [[2], [4]] and steps[2:] == [(8, 4), (8, 4)]


@pytest.mark.parametrize("block", [4, 8])
@pytest.mark.parametrize("quantized", [(), (0,)], ids=["plain", "with a tail"])
def test_what_was_drafted_wrong_is_found_by_nobody(block, quantized):
    """Drafts fill blocks, which are not findable, and are written over."""
    expected = alone(GREEDY, block=block, quantized=quantized)
    with fake_engine(drafter=never(expected.token_ids), block=block, quantized=quantized) as engine:
        same(run(engine, replace(GREEDY, draft_tokens=8)), expected)
        engine._core.speculation.drafter = says(expected.token_ids)
        again = run(engine, replace(GREEDY, draft_tokens=8), PROMPT + expected.token_ids[:20])
        assert again.cached_tokens == (len(PROMPT) + 20 - 1) // block * block
        assert again.token_ids[:4] == expected.token_ids[20:]


def test_more_drafts_than_rows_are_given_in_order():
    drafter = Script(lambda seq, most: [0] * most)
    engine = stepped(fake_engine, drafter=drafter, draft_rows=5)
    with engine:
        for i in range(3):
            engine.submit([i], Sampling(max_new_tokens=9, ignore_eos=True, draft_tokens=3))
        engine._loop.attend(), engine._core.step()
    assert drafter.calls == [[3, 2]]


@pytest.mark.parametrize("name", ["draft", "acceptance", "max_draft_tokens"])
def test_an_engine_that_is_loaded_takes_no_drafter(name):
    from runtime import generate

    value = {"draft": "lookup", "acceptance": "rejection", "max_draft_tokens": 3}[name]
    with fake_engine() as engine, pytest.raises(RequestError, match=f"Give {name} to runtime.load"):
        generate(engine, [PROMPT], **{name: value})


@pytest.mark.parametrize("kind", ["likely", "wrong"])
def test_the_rejection_rule_keeps_the_distribution(kind):
    """Three tokens after a prompt, over many seeds, against their exact probabilities; of the second comes a
    draft, that is certain."""
    s = Sampling(max_new_tokens=3, temperature=1.0, top_k=2, draft_tokens=1)

    def after(*tokens: int) -> np.ndarray:
        return sampler.probabilities(reference([*PROMPT, *tokens], [None]), 1.0, 2)

    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        rows = {tokens: after(*tokens) for tokens in exact}
        exact = {(*t, i): p * rows[t][i] for t, p in exact.items() for i in np.flatnonzero(rows[t]).tolist()}
    rank = {"likely": 0, "wrong": VOCAB - 1}[kind]

    def propose(seq: Sequence, most: int) -> list[int]:
        if seq.num_tokens != len(PROMPT) + 1:
            return []
        return [int(np.argsort(-after(int(seq.ids[len(PROMPT)])), kind="stable")[rank])]

    with fake_engine(drafter=Script(propose), acceptance="rejection") as engine:
        count = 600
        requests = [engine.submit(PROMPT, replace(s, seed=i)) for i in range(count)]
        found = Counter(tuple(r.result(timeout_s=120).token_ids) for r in requests)
    assert set(found) <= set(exact)
    chi = sum((found[tokens] - count * p) ** 2 / (count * p) for tokens, p in exact.items())
    assert len(exact) == 8 and chi < 24.3  # of 7 degrees of freedom one in a thousand is more


@pytest.mark.parametrize("sampling", [GREEDY, replace(SAMPLED, n=3)], ids=["greedy", "several samples"])
def test_the_rejection_rule_goes_with_all_else(sampling):
    """Greedy it is equality. What is sampled has the log-probabilities of the model's own rows."""
    expected = alone(GREEDY)
    drafter = Script(lambda seq, most: expected.token_ids[seq.num_tokens - len(PROMPT) :][:most])
    with fake_engine(drafter=drafter, acceptance="rejection") as engine:
        found = engine.submit(PROMPT, replace(sampling, draft_tokens=3)).results(timeout_s=60)
        assert engine.stats().drafted_tokens > 0 and engine.stats().draft_failures == 0
    if sampling == GREEDY:
        same(found[0], expected)
    for completion in found:
        tokens = [*PROMPT, *completion.token_ids]
        for i, given in enumerate(completion.logprobs):
            row = sampler.log_softmax(reference(tokens[: len(PROMPT) + i], [None]))
            assert given.token_id == completion.token_ids[i]
            assert given.logprob == np.float32(row[given.token_id])
            assert [token_id for token_id, _ in given.top] == np.argsort(-row, kind="stable")[:2].tolist()
