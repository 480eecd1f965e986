"""--check: a pass that changes what the graph computes is named, with the first op that differs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest

from compiler.check import Checker, CheckError, random_batch, relative_error
from compiler.pipeline import run_pipeline
from ir.graph import Graph, Op, Scalar
from passes.base import Pass, Result
from passes.dce import Dce
from passes.page_kv import PageKv
from passes.quantize_kv import QuantizeKv
from passes.select_rows import SelectRows
from tests.passes.test_page_kv import VOCAB, two_layers, weights


@dataclass(frozen=True)
class BreakOp(Pass):
    """Changes one attribute or operand of the op called `target`."""

    target: str = ""
    attr: str = ""
    value: object = None

    def run(self, graph: Graph) -> Result:
        return Result(replace(graph, ops=tuple(self._break(op) for op in graph.ops)), 1)

    def _break(self, op: Op) -> Op:
        if op.outs[0].name != self.target:
            return op
        if self.attr:
            return op.with_attrs(**{self.attr: self.value})
        return replace(op, args=(*op.args[:-1], Scalar(1.001)))


@dataclass(frozen=True)
class SwapOutput(Pass):
    def run(self, graph: Graph) -> Result:
        return Result(replace(graph, outputs=(graph.ops[-2].outs[0],)), 1)


PASSES = (Dce(), PageKv(), SelectRows())


def check(*passes: Pass) -> None:
    graph = two_layers()
    read = weights(graph).__getitem__
    run_pipeline(graph, passes, Checker(read, random_batch(VOCAB, 40)).on_stage)


def test_passes_that_keep_the_meaning_pass() -> None:
    check(*PASSES)


@pytest.mark.parametrize("position", [0, 1, 2, 3])
def test_a_broken_pass_is_named_wherever_it_stands(position: int) -> None:
    passes = [*PASSES]
    passes.insert(position, BreakOp("o1", "scale", 0.5))
    with pytest.raises(CheckError, match="break_op") as caught:
        check(*passes)
    assert caught.value.op is not None and caught.value.op.outs[0].name == "o1"
    assert "model.attn1" in str(caught.value)


def test_a_mask_one_off_is_found() -> None:
    from ir.predicates import KEY, QUERY

    with pytest.raises(CheckError, match="break_op"):
        check(BreakOp("o1", "mask", KEY < QUERY + 1), BreakOp("o1", "mask", KEY < QUERY + 2))


def test_a_pass_that_puts_another_value_out_is_found() -> None:
    with pytest.raises(CheckError, match="swap_output"):
        check(SwapOutput())


def test_a_stage_that_only_annotates_is_not_run_again() -> None:
    graph = two_layers()
    read = weights(graph)
    seen: list[str] = []

    def reader(name: str) -> np.ndarray:
        seen.append(name)
        return read[name]

    run_pipeline(graph, (BreakOp("o1", "group", 3), Dce()), Checker(reader, random_batch(VOCAB, 40)).on_stage)
    assert sorted(seen) == sorted(read)


@pytest.mark.parametrize("steps", [(), (QuantizeKv("int8"),)], ids=["plain", "quantized"])
def test_single_logits_may_differ_where_values_are_rounded_to_codes(steps: tuple[Pass, ...]) -> None:
    graph, batch = two_layers(), random_batch(VOCAB, 40)
    checker = Checker(weights(graph).__getitem__, batch)
    run_pipeline(graph, (*PASSES, *steps), checker.on_stage)
    logits = checker._before["logits"].array.copy()
    rms = np.sqrt(np.mean(logits**2))
    checker.compare_logits("kernels", logits)
    with pytest.raises(CheckError, match="kernels gives logits"):
        checker.compare_logits("kernels", logits + 0.01 * rms)
    logits[3, 4] += 0.01 * rms
    if steps:
        checker.compare_logits("kernels", logits)
    else:
        with pytest.raises(CheckError):
            checker.compare_logits("kernels", logits)


def test_relative_error_sees_nan_and_infinity() -> None:
    good = np.array([1.0, np.inf, np.nan])
    assert relative_error(good, good) == 0
    assert not relative_error(good, np.array([1.0, np.inf, 3.0])) < 1
    assert not relative_error(good, np.array([1.0, 5.0, np.nan])) < 1


def test_random_batches_differ_by_seed_and_cover_two_requests() -> None:
    first, second = random_batch(100, 64, seed=1), random_batch(100, 64, seed=2)
    assert any((a != b).any() for a, b in zip(first.requests, second.requests, strict=True))
    assert len(first.requests) == 2 and max(first.lengths) > 16
    for block in (8, 16, 32, 64):
        assert max(random_batch(100, 128, block).lengths) > block, "one block is all that is looked up"
    assert max(random_batch(100, 10, 64).lengths) == 10
