"""Every schedule of a fake model, whose arithmetic is exact, gives what the model's definition says."""

from __future__ import annotations

from collections import Counter
from functools import cache, partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule, run_state_machine_as_test

from runtime import Sampling, sampler
from runtime.beam import BeamSearch
from runtime.completion import TokenLogprob
from runtime.errors import EngineError
from runtime.penalties import adjust
from runtime.speculation.lookup import LookupDrafter
from tests.examples import examples, happened
from tests.runtime.fake import VOCAB, Window, Words, fake_engine, logits_of, next_state
from tests.runtime.schedules import HAPPENS, Alone, EngineMachine, one_of_each, prompts, stepped

CONTEXT = 64
EOS = (5, 11)
Groups = tuple[tuple[Window, ...], tuple[int, ...]]  # windows, and which of them are quantised
GROUPS: tuple[Groups, ...] = (
    ((None,), ()), ((None, 10), ()), ((7,), ()), ((13, None, 4), ()), ((None,), (0,)), ((10, None), (0, 1)),
    (("state",), ()), ((None, "state"), ()), (("state", 10, None), (2,)), (("state", "state", 7), ()),
)  # fmt: skip
WORDS = prompts(VOCAB, CONTEXT)


class Definition:
    """The fake model without a cache, and what it says is kept for texts that begin alike."""

    def __init__(self, groups: Groups, block: int | None) -> None:
        self._windows, quantized = groups
        self._quantized = [block if g in quantized else None for g in range(len(self._windows))]
        self._kept: dict[tuple[int, ...], tuple[np.ndarray, list[Words]]] = {}

    def logits(self, tokens: tuple[int, ...]) -> np.ndarray:
        """After the last one: f32 [V]."""
        return self._run(tokens)[0]

    def samples(self, prompt: tuple[int, ...], sampling: Sampling) -> list[Alone]:
        scores = self._scores(prompt, sampling)
        if sampling.beams > 1:
            return [found._replace(prompt_logprobs=scores) for found in self._search(prompt, sampling)]
        return [self._sample(prompt, sampling, i)._replace(prompt_logprobs=scores) for i in range(sampling.n)]

    def _run(self, tokens: tuple[int, ...]) -> tuple[np.ndarray, list[Words]]:
        if tokens in self._kept:
            return self._kept[tokens]
        past = self._run(tokens[:-1])[1] if len(tokens) > 1 else [([], []) for _ in self._windows]
        state, words = next_state(tokens[-1], len(tokens) - 1, past, self._windows, self._quantized)
        self._kept[tokens] = logits_of(state), words
        return self._kept[tokens]

    def _sample(self, prompt: tuple[int, ...], s: Sampling, index: int) -> Alone:
        tokens, logprobs, reason = prompt, [], "length"
        while len(tokens) < min(len(prompt) + s.max_new_tokens, CONTEXT):
            row = self.logits(tokens)
            token = sampler.sample(
                adjust(row, s, np.array(tokens), len(prompt)),
                temperature=s.temperature,
                top_k=s.top_k,
                top_p=s.top_p,
                min_p=s.min_p,
                seed=s.seed,
                sample_index=index,
                position=len(tokens),
            )
            tokens += (token,)
            logprobs.append(scored(row, token, s.logprobs or 0))
            if token in EOS and not s.ignore_eos:
                reason = "stop"
                break
        found = list(tokens[len(prompt) :])
        return Alone(found, reason, None if s.logprobs is None else logprobs, None, None)

    def _scores(self, prompt: tuple[int, ...], s: Sampling) -> list[TokenLogprob | None] | None:
        if s.prompt_logprobs is None:
            return None
        starts = (prompt[:length] for length in range(1, len(prompt)))
        rows = [self.logits(start) for start in starts]
        return [
            None,
            *(scored(row, after, s.prompt_logprobs) for row, after in zip(rows, prompt[1:], strict=True)),
        ]

    def _search(self, prompt: tuple[int, ...], s: Sampling) -> list[Alone]:
        ends = () if s.ignore_eos else EOS
        most = min(s.max_new_tokens, CONTEXT - len(prompt))
        if not most:
            return [Alone([], "length", None if s.logprobs is None else [], None, None)] * s.n
        search = BeamSearch(
            s.beams, ends, most, early_stopping=s.early_stopping, alternatives=s.logprobs or 0
        )
        while not search.done:
            texts = [prompt + tuple(t.token_id for t in beam.tokens()) for beam in search.live]
            search.step([scored(self.logits(text), 0, search.width).top for text in texts])
        found = [(score, beam.tokens()) for score, beam in search.outcome()[: s.n]]
        return [
            Alone(
                [t.token_id for t in tokens],
                "stop" if tokens[-1].token_id in ends else "length",
                None if s.logprobs is None else tokens,
                None,
                score,
            )
            for score, tokens in found
        ]


def scored(row: np.ndarray, token: int, width: int) -> TokenLogprob:
    ids, logprobs = sampler.top(row, width)
    top = tuple(zip(ids.tolist(), logprobs.astype(np.float32).tolist(), strict=True))
    return TokenLogprob(token, float(np.float32(sampler.log_softmax(row)[token])), top)


class FakeMachine(EngineMachine):
    """And steps fail: then those that were in them do, and others go on as if nothing had been."""

    def __init__(self, totals: Counter[str]) -> None:
        super().__init__(totals, WORDS, lambda *_: [])

    @initialize(
        block=st.sampled_from((4, 8)),
        groups=st.sampled_from(GROUPS),
        room=st.lists(st.integers(40, 160), min_size=4, max_size=4),
        budget=st.sampled_from((1, 5, 16, 64)),
        max_requests=st.sampled_from((1, 3, 4, 6)),
        score_rows=st.sampled_from((1, 5, 64)),
        prefix_cache=st.sampled_from((True, True, True, False)),
        places=st.sampled_from((0, 3, 40, 40)),
        drafts=st.sampled_from((None, "lookup", "oracle", "oracle", "oracle", "broken")),
        seed=st.integers(0, 999),
    )
    def start(
        self, block, groups, room, budget, max_requests, score_rows, prefix_cache, places, drafts, seed
    ):
        self.places, self.limit = places, (budget, max_requests)
        windows, quantized = groups
        self.expect = definition(groups, block if quantized else None).samples
        engine = stepped(
            fake_engine,
            block=block,
            windows=windows,
            quantized=quantized,
            kv_blocks=[size // block for _, size in zip(windows + quantized, room, strict=False)],
            max_step_tokens=budget,
            max_requests=max_requests,
            score_rows=score_rows,
            prefix_cache=prefix_cache,
            places=places,
            max_context=CONTEXT,
            eos=EOS,
            drafter=None if drafts is None else LookupDrafter(),
            draft_rows=(1, 3, 40)[seed % 3],
        )
        self.begin(engine)
        self.draft(drafts, seed, engine._executor.scribble)

    @precondition(lambda self: self.made and not self.injected)
    @rule(where=st.sampled_from(("fail", "fail_copies")), rarely=st.integers(0, 5))
    def broken_turn(self, where, rarely):
        if rarely:
            return
        self.injected = True
        setattr(self.core.executor, where, EngineError("injected"))
        self.take_turn()
        setattr(self.core.executor, where, None)

    def finish(self):
        super().finish()
        assert all(t <= self.limit[0] and r <= self.limit[1] for t, r in self.core.executor.steps)
        assert all(a.number + 1 == b.number for a, b in pairwise(self.core.log.since()))


@cache
def definition(groups: Groups, block: int | None) -> Definition:
    return Definition(groups, block)


@pytest.mark.parametrize("drafts", [None, "oracle"], ids=["no drafts", "drafts"])
@pytest.mark.parametrize(
    "groups",
    [((None, 10), ()), ((None, 10), (0, 1)), ((None, "state"), ()), ((None, "state"), (0,))],
    ids=["plain", "with tails", "with a state", "with a state and a tail"],
)
def test_one_of_each_gives_what_the_model_says(groups, drafts):
    machine = FakeMachine(Counter())
    machine.start(8, groups, (96, 96, 96, 96), 16, 4, 5, True, 40, drafts, 2)
    one_of_each(machine)
    happened(machine.totals, HAPPENS[: None if drafts else -2], always=True)


def test_any_schedule_gives_what_the_model_says(record_property):
    totals: Counter[str] = Counter()
    run_state_machine_as_test(partial(FakeMachine, totals), settings=examples(25, steps=30))
    record_property("totals", happened(totals, (*HAPPENS, "fail", "failed requests", "draft_failed")))
