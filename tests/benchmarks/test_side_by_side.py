"""What benchmarks/compare.py makes of times: rates, ratios, shares, files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compiler.profile.limits import Limits
from sidebyside import results, summary, table
from sidebyside.pairs import Pair, Pairs, agreement
from sidebyside.results import Result
from sidebyside.workloads import WORKLOADS, Times, Workload

WORKLOAD = Workload("one", "", 1, 0, 100, 11, ("decode",))


def result(pairs: list[Pair], workload: str = "one") -> Result:
    shares = {"bandwidth_share": 0.9, "peak_share": 0.7}
    facts = {"version": "1"}
    taken = "2026-01-01T00:00Z"
    return Result("llamacpp", "f32", "F32", workload, taken, 2, facts, facts, Pairs(pairs, 1.0), shares)


def pair(octavo_s: float, peer_s: float, bandwidth: float = 20e9) -> Pair:
    """Both take half a second to the first token and so many after it."""
    return Pair(Limits(bandwidth, 1e11, 0, 0, 0), Times(0.5, 0.5 + octavo_s), Times(0.5, 0.5 + peer_s))


def test_rates() -> None:
    assert WORKLOAD.rates(Times(0.5, 2.5)) == {"prefill": 200, "output": 4.4, "decode": 5}
    sixteen = replace(WORKLOAD, num_requests=16)
    assert sixteen.rates(Times(0.5, 2.0)) == {"prefill": 3200, "output": 88}


def test_the_ratio_is_the_median_of_the_pairs_ratios() -> None:
    # 127 tokens after the first: rates 127, 63.5, 12.7 against 63.5, 127, 50.8
    row = summary.row(result([pair(1, 2), pair(2, 1), pair(10, 2.5)]), "decode")
    assert (row.octavo, row.peer_rate) == pytest.approx((63.5, 63.5))
    assert (row.ratio, row.lowest, row.highest) == pytest.approx((0.5, 0.25, 2))


def test_the_share_is_of_what_bounds_the_figure() -> None:
    made = result([pair(1, 1, 20e9), pair(1, 1, 30e9), pair(1, 1, 90e9)])
    assert summary.row(made, "decode").bandwidth == 30e9
    assert summary.row(made, "decode").share == 0.9
    assert summary.row(made, "prefill").share == 0.7
    assert summary.row(made, "output").share is None


def test_agreement_ends_at_the_first_difference() -> None:
    assert agreement([1, 2, 3, 4], [1, 2, 9, 4]) == 0.5
    assert agreement([1, 2], [1, 2]) == 1
    assert agreement([1, 2], [1, 2, 3, 4]) == 0.5


def test_prompts_are_new_for_every_turn() -> None:
    rng = np.random.default_rng(0)
    first, second = (WORKLOADS["sixteen"].prompts(rng, 1000) for _ in range(2))
    assert len({tuple(prompt) for prompt in first + second}) == 32
    assert {len(prompt) for prompt in first} == {128}


def test_a_file_keeps_one_result_of_each_kind(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    old, new, other = result([pair(1, 2)]), result([pair(2, 1)]), result([pair(1, 1)], "prefill")
    for each in (old, other, new):
        results.add(path, each)
    assert results.read(path) == [new, other]


def test_a_file_is_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "results.json"
    results.add(path, result([pair(1, 2)]))
    monkeypatch.setattr(results, "cpu_name", lambda: "another")
    with pytest.raises(results.ResultsError, match="not on another"):
        results.add(path, result([pair(1, 2)]))


def test_a_cpu_is_named_with_its_generation() -> None:
    text = "processor\t: 0\ncpu family\t: 25\nmodel\t\t: 1\nmodel name\t: AMD EPYC\n"
    assert results.cpu_name(text) == "AMD EPYC (family 25, model 1)"


def test_markdown() -> None:
    lines = table.markdown([summary.row(result([pair(1, 2)]), "decode")]).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert "| llama.cpp | f32 / F32 |" in lines[2] and "| 127 | 63.5 | 2.00 |" in lines[2]
