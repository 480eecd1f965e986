"""The figures of benchmarks/speculation.py, and that it holds outputs against each other."""

from __future__ import annotations

from typing import Any

import pytest
from speculationbench import pairs, workloads
from speculationbench.workloads import ANY, Workload

import runtime
from runtime.speculation.lookup import LookupDrafter
from tests.runtime.fake import VOCAB, fake_engine
from tests.runtime.test_draft_engine import drafter


def test_the_best_possible_is_what_the_chances_give() -> None:
    exact = ((1000, 800), (1000, 640), (1000, 512))  # 80% at each place, after one that was right
    assert pairs.best_possible(exact) == pytest.approx(1 + 0.8 + 0.64 + 0.512)
    assert pairs.best_possible(()) == 1.0
    assert pairs.best_possible(((10, 0), (10, 0))) == 1.0
    shorter = ((10, 10), (4, 4))  # no place counts as refused where none was drafted
    assert pairs.best_possible(shorter) == 3.0


def test_a_bound_is_of_the_drafter_that_it_is_promised_for() -> None:
    copied = Workload("copy", [], 24, at_least={"lookup": 2.5})
    assert copied.bound("lookup") == 2.5
    assert copied.bound("self") is None and copied.bound("other.octavo") is None
    assert copied.bound("lookup", 0.0) == 0.0 and copied.bound("self", 1.5) == 1.5
    assert Workload("sixteen", [], 24, at_least={ANY: 0.95}).bound("other.octavo") == 0.95


def test_what_repeats_by_chance_is_drafted_and_refused() -> None:
    with fake_engine(drafter=LookupDrafter(), max_context=2048) as engine:
        workload = workloads.chance(engine, 64)
        few = set(workload.prompts[0])
        assert len(few) == workloads.FEW
        # A fixed number of drafts: how many pay here is a matter of times.
        done: Any = runtime.generate(
            engine, workload.prompts, max_new_tokens=64, draft_tokens=4, **dict(workload.sampling)
        )
        assert all(set(each.token_ids) <= few for each in done)
        drafts = [each.draft for each in done if each.draft is not None]
        drafted = sum(draft.drafted for draft in drafts)
        assert drafted > 60 and sum(draft.accepted for draft in drafts) < 0.3 * drafted


def test_pairs_are_of_equal_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = Workload("few", [[3, 1, 4], [1, 5, 9, 2]], 24)
    engine = fake_engine(drafter=drafter(), max_context=256)
    with engine:
        found = pairs.measure(engine, workload, 2)
        figures = found.figures()
        assert len(found.plain) == len(found.drafted) == 2
        assert figures["speedup_least"] <= figures["speedup"] <= figures["speedup_most"]
        assert figures["accepted_tokens"] == figures["drafted_tokens"]
        assert all(len(ids) == 24 for run in (*found.plain, *found.drafted) for ids in run.token_ids)
        run = pairs._run

        def changed(*args: Any) -> pairs.Run:
            found = run(*args)
            if args[2].draft_tokens is None:
                found.token_ids[0][-1] = (found.token_ids[0][-1] + 1) % VOCAB
            return found

        monkeypatch.setattr(pairs, "_run", changed)
        with pytest.raises(AssertionError, match="drafts changed an output"):
            pairs.measure(engine, workload, 1)
