"""The GPU targets' executor under a whole engine, on a device of Python (fake_device.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import ArtifactError, EngineError, ResourceError, Sampling, generate, sampler
from runtime.engine import Engine
from runtime.executor import SampleArgs
from runtime.gpu.executor import GpuExecutor
from runtime.gpu.memory import upload_weights, weight_offsets
from runtime.gpu.steps import Tables, decode_buckets
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.swap import Swap
from runtime.limits import Limits
from runtime.memory.plan import Place
from runtime.step import Step
from runtime.weights import Weights
from tests.runtime import made
from tests.runtime.fake import BLOCK, VOCAB, reference
from tests.runtime.fake_device import FakeDevice, ModelKernels, compiled, raw_plan
from tests.runtime.test_engine import PROMPTS, expected
from tests.runtime.test_penalties import KINDS
from tests.runtime.test_penalties import check as check_penalised

GREEDY = Sampling(max_new_tokens=12)
REPORTED = Sampling(max_new_tokens=12, logprobs=2, prompt_logprobs=1)
FILTERED = Sampling(max_new_tokens=12, temperature=0.9, top_k=40, top_p=0.95, min_p=0.01, seed=5)
DRAWN = Sampling(max_new_tokens=12, temperature=0.9, seed=2**63 + 5, logprobs=0)
ALL = [GREEDY, REPORTED, FILTERED, DRAWN]
PENALTIES = KINDS["all"]
CONTEXT = 256


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "w.safetensors"
    path.write_bytes(made.safetensors({"w": np.arange(4, dtype=np.float32)}))
    return path


def opened(
    weights: Path,
    limits: Limits,
    num_blocks: Sequence[int],
    windows: Sequence[int | None] = (None,),
    raw: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[FakeDevice, ModelKernels, GpuExecutor]:
    model = ModelKernels(windows, num_blocks)
    device = FakeDevice(model.functions, **{k: options.pop(k) for k in ("free",) if k in options})
    what = compiled(Weights(weights, ["w"]), windows, CONTEXT, raw or raw_plan(len(windows)))
    return device, model, GpuExecutor(device, what, limits, num_blocks, **options)


def engine_of(
    weights: Path, windows: Sequence[int | None] = (None,), blocks: int = 64, places: int = 0
) -> tuple[FakeDevice, ModelKernels, Engine]:
    """places: for blocks on the host."""
    limits, counts = Limits(40, 11, 30), [blocks] * len(windows)
    device, model, executor = opened(weights, limits, counts, windows, swap_blocks=places)
    cache = Cache([Group(n, w) for n, w in zip(counts, windows, strict=True)])
    about = compiled(Weights(weights, ["w"]), windows, CONTEXT, raw_plan(len(windows))).model
    return device, model, Engine(executor, about, cache, limits, swap=Swap(cache, places))


@pytest.mark.parametrize("windows", [(None,), (None, 9)])
@pytest.mark.parametrize(("blocks", "places"), [(64, 0), (12, 0), (12, 30)])
def test_tokens_are_the_models(weights, monkeypatch, windows, blocks, places):
    """All kinds of sampling side by side, in steps of prompts' chunks and of tokens; few blocks preempt."""
    monkeypatch.setattr("runtime.gpu.steps.LEAST_WIDTH", 1)
    device, model, engine = engine_of(weights, windows, blocks, places)
    with engine:
        requests = [(p, s, engine.submit(p, s)) for s in ALL for p in PROMPTS]
        for prompt, sampling, request in requests:
            assert request.result().token_ids == expected(prompt, sampling, windows)
        stats = engine.stats()
    assert (stats.preemptions > 0) == (blocks < 64) and (stats.swapped_blocks > 0) == (places > 0)
    assert device.closed and stats.target == "fake" and len(set(model.widths)) > 1
    assert any(t == r == q for t, r, q in model.steps) and any(t > r > 1 for t, r, _ in model.steps)


@pytest.mark.parametrize("logprobs", [None, 2])
def test_penalties_change_the_rows_of_those_who_ask_and_no_log_probability(weights, logprobs):
    """Beside rows without, and samples of one row."""
    _, _, engine = engine_of(weights)
    adjusted = [replace(s, logprobs=logprobs, n=n, **PENALTIES) for s, n in ((GREEDY, 1), (FILTERED, 2))]
    with engine:
        requests = [(p, s, engine.submit(p, s)) for p in PROMPTS[:4] for s in (GREEDY, *adjusted)]
        for prompt, sampling, request in requests:
            for done in request.results():
                check_penalised(done, prompt, sampling)


def test_log_probabilities_are_the_models(weights):
    _, _, engine = engine_of(weights)
    with engine:
        done = engine.submit(PROMPTS[4], REPORTED).result()
    tokens = PROMPTS[4] + done.token_ids
    for position, found in enumerate(done.prompt_logprobs[1:] + done.logprobs, 1):
        logits = reference(tokens[:position], [None])
        np.testing.assert_allclose(found.logprob, sampler.log_softmax(logits)[tokens[position]], rtol=1e-6)
        width = 1 if position < len(PROMPTS[4]) else 2
        ids, logprobs = sampler.top(logits, width)
        assert [i for i, _ in found.top] == ids.tolist()
        np.testing.assert_allclose([p for _, p in found.top], logprobs, rtol=1e-6)


def test_samples_fork_on_the_device(weights):
    device, _, engine = engine_of(weights)
    sampling = Sampling(max_new_tokens=9, temperature=1.0, seed=3, n=3)
    with engine:
        samples = generate(engine, PROMPTS[4], sampling)
        for sample in samples:
            assert sample.token_ids == expected(PROMPTS[4], sampling, sample_index=sample.sample_index)
        assert device.counts["copy"] == engine.stats().copied_blocks == 2


@pytest.mark.parametrize("sampling", [GREEDY, REPORTED, FILTERED])
def test_a_broken_row_fails_its_request_alone(weights, sampling):
    _, model, engine = engine_of(weights)
    tokens = expected(PROMPTS[5], sampling)
    model.nan = tokens[3]
    with engine:
        requests = [engine.submit(p, sampling) for p in PROMPTS]
        with pytest.raises(EngineError, match="logits: the model computed NaN or infinity. Report it"):
            requests[5].result()
        for prompt, request in zip(PROMPTS, requests, strict=True):
            wanted = expected(prompt, sampling)
            if model.nan not in (prompt if sampling is REPORTED else prompt[-1:]) + wanted[:-1]:
                assert request.result().token_ids == wanted


def test_what_is_wrong_with_a_broken_row_is_said(weights):
    _, model, executor = opened(weights, Limits(40, 11, 5), [44])
    model.nan = 7
    rows = executor.forward(decode_step([5, 7], 0))
    with pytest.raises(EngineError, match="fake: a row of logits has no largest number: NaN or infinity"):
        executor.sample(rows, SampleArgs.greedy(2, 0))
    assert executor.broken_rows(rows) == [1]
    executor.close()


def test_a_failure_of_the_device_fails_the_step(weights):
    device, _, engine = engine_of(weights)
    with engine:
        device.fail = "cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS"
        with pytest.raises(EngineError, match="cuStreamSynchronize failed: CUDA_ERROR_ILLEGAL_ADDRESS"):
            engine.submit(PROMPTS[1], GREEDY).result()
        device.fail = None
        assert engine.submit(PROMPTS[1], GREEDY).result().token_ids == expected(PROMPTS[1], GREEDY)


# --- steps


def decode_step(tokens: list[int], pos: int) -> Step:
    """One token of each request, which has the blocks from 4 times its number on."""
    count, width = len(tokens), CONTEXT // BLOCK
    table = np.arange(count)[:, None] * 4 + np.arange(4)
    return Step(
        ids=np.array(tokens, np.int32),
        pos=np.full(count, pos, np.int32),
        starts=np.arange(count + 1, dtype=np.int32),
        lens=np.full(count, pos + 1, np.int32),
        rows=np.arange(count, dtype=np.int32),
        slots=[(table[:, pos // BLOCK] * BLOCK + pos % BLOCK).astype(np.int32)],
        tables=[np.pad(table, ((0, 0), (0, width - 4))).astype(np.int32)],
    )


def test_decode_steps_are_padded_and_recorded_once(weights):
    device, model, executor = opened(weights, Limits(40, 11, 5), [44], buckets=[1, 2, 4, 8, 11])
    plain, _, exact = opened(weights, Limits(40, 11, 5), [44], buckets=[])
    for pos, count in enumerate([3, 11, 4, 3, 1, 2, 3, 9, 9, 10]):
        step = decode_step(list(range(5, 5 + count)), pos)
        args = SampleArgs.greedy(count, 3)
        rows, others = executor.forward(step), exact.forward(step)
        assert len(rows) == count
        found, wanted = executor.sample(rows, args), exact.sample(others, args)
        assert found.ids.tolist() == wanted.ids.tolist() and found.top_ids.tolist() == wanted.top_ids.tolist()
        np.testing.assert_array_equal(executor.download(rows), exact.download(others))
    padded = [4, 11, 4, 4, 1, 2, 4, 11, 11, 11]
    assert model.steps == [(n, n, n) for n in padded]
    assert (device.counts["record"], device.counts["replay"]) == (4, 10)
    assert plain.counts["record"] == 0
    executor.close()
    exact.close()


def test_tables_are_as_wide_as_the_longest_request_needs(weights, monkeypatch):
    """All that is uploaded and recorded is for so many columns."""
    monkeypatch.setattr("runtime.gpu.steps.LEAST_WIDTH", 1)
    device, model, executor = opened(weights, Limits(40, 11, 5), [44], buckets=[4])
    plain, _, exact = opened(weights, Limits(40, 11, 5), [44], buckets=[])
    for pos in range(3 * BLOCK):
        step = decode_step([5 + pos, 6, 7], pos)
        rows, others = executor.forward(step), exact.forward(step)
        np.testing.assert_array_equal(executor.download(rows), exact.download(others))
    assert model.widths == [1] * BLOCK + [4] * 2 * BLOCK
    assert (device.counts["record"], device.counts["replay"], plain.counts["record"]) == (2, 3 * BLOCK, 0)
    executor.close()
    exact.close()


def test_widths_are_few_and_end_with_the_whole_context():
    tables = Tables(1, 5000, 16)
    lens = [0, 1, 64 * 16, 64 * 16 + 1, 256 * 16, 256 * 16 + 1, 4096 * 16 + 1, 5000 * 16]
    found = [tables.width_for(np.array([1, n], np.int32)) for n in lens]
    assert found == [64, 64, 64, 256, 256, 1024, 5000, 5000]
    assert tables.width_for(np.zeros(0, np.int32)) == 64
    assert Tables(1, 7, 16).width_for(np.array([3], np.int32)) == 7


def test_a_decode_step_waits_for_its_tokens_alone(weights):
    device, _, executor = opened(weights, Limits(40, 11, 5), [44])
    executor.sample(executor.forward(decode_step([1, 2, 3], 0)), SampleArgs.greedy(3, 0))
    before = device.counts.copy()
    executor.sample(executor.forward(decode_step([4, 5, 6], 1)), SampleArgs.greedy(3, 0))
    device.counts.subtract(before)
    done = {kind: count for kind, count in device.counts.items() if count}
    assert done == {"upload": 2, "replay": 1, "launch": 1, "download": 1, "synchronize": 1}
    executor.close()


def test_a_step_without_rows_is_waited_for_before_the_next(weights):
    """Its arrays are those that the next step is written to."""
    device, model, executor = opened(weights, Limits(40, 11, 5), [44])
    step = decode_step([1, 2, 3], 0)
    executor.forward(Step(step.ids, step.pos, step.starts, step.lens, step.rows[:0], step.slots, step.tables))
    rows = executor.forward(decode_step([4, 5, 6], 1))
    assert len(executor.download(rows)) == 3 and model.steps == [(3, 3, 0), (4, 4, 4)]
    executor.close()


@pytest.mark.parametrize("most", [1, 2, 3, 7, 8, 9, 64, 100, 300])
def test_buckets_end_with_the_largest_step(most):
    buckets = decode_buckets(most)
    assert list(buckets) == sorted(set(buckets)) and buckets[0] == 1 and buckets[-1] == most
    assert all(b <= 2 * a or b <= 8 for a, b in zip(buckets, buckets[1:], strict=False))


# --- memory


def test_blocks_come_back_from_the_host(weights):
    device, _, executor = opened(weights, Limits(40, 11, 5), [6], swap_blocks=3)
    pool = executor._pools[0]
    held = np.random.default_rng(0).integers(0, 255, (6, pool._block_bytes)).astype(np.uint8)
    for block, data in enumerate(held):
        device.upload(pool._at(block), data)
    executor.swap_out(0, np.array([[4, 0], [1, 2]], np.int32))
    executor.copy_blocks(0, np.array([[0, 4], [0, 1]], np.int32))
    executor.swap_in(0, np.array([[0, 5], [2, 4]], np.int32))
    found = np.empty_like(held)
    for block, data in enumerate(found):
        device.download(data, pool._at(block))
    device.synchronize()
    np.testing.assert_array_equal(found, held[[0, 0, 2, 3, 1, 4]])
    for wrong in ([[4, 3]], [[6, 0]], [[-1, 0]]):
        with pytest.raises(EngineError, match="6 blocks on the device and 3 on the host"):
            executor.swap_out(0, np.array(wrong, np.int32))
    executor.close()


def test_memory_is_refused_before_any_is_taken(weights):
    what = compiled(Weights(weights, ["w"]), (None,), CONTEXT, raw_plan(1))
    plan = what.memory(Limits(40, 11, 5), [4000], Place("a device", None))
    assert plan.kv_bytes == 4000 * 16 * 16
    assert plan.workspace.logits == 16 * VOCAB * 4 and plan.workspace.arena == 48 + 16
    device = FakeDevice({}, free=plan.total_bytes - 1)
    with pytest.raises(ResourceError, match=r"KiB of memory free; .* KV cache 1,000.0 KiB\. Lower kv_memory"):
        GpuExecutor(device, what, Limits(40, 11, 5), [4000])
    assert device.closed and device.counts == {}


def test_what_is_taken_is_what_was_counted(weights):
    what = compiled(Weights(weights, ["w"]), (None,), CONTEXT, raw_plan(1))
    total = what.memory(Limits(40, 11, 5), [44], Place("a device", None)).total_bytes
    device, _, executor = opened(weights, Limits(40, 11, 5), [44], free=total)
    assert device.free_bytes == 0
    executor.close()


def test_large_weights_come_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("runtime.gpu.memory.PIECE_BYTES", 1000)
    rng = np.random.default_rng(1)
    sizes = {"a": 900, "b": 1, "c": 250, "d": 251}
    tensors = {name: rng.random(size, np.float32) for name, size in sizes.items()}
    (tmp_path / "w.safetensors").write_bytes(made.safetensors(tensors))
    weights = Weights(tmp_path / "w.safetensors", ["d", "b", "a", "c"])
    device = FakeDevice({})
    offsets, size = weight_offsets([t.size for t in weights.tensors])
    places = upload_weights(device, weights, device.allocate(size, "weights"), offsets)
    for place, name in zip(places, "dbac", strict=True):
        found = np.empty_like(tensors[name])
        device.download(found, place)
        device.synchronize()
        np.testing.assert_array_equal(found, tensors[name])
        assert place % 256 == 0
    assert device.counts["host_array"] == device.counts["free_host"] == 1


def test_a_closed_executor_says_so(weights):
    device, _, executor = opened(weights, Limits(40, 11, 5), [44])
    executor.close()
    executor.close()
    for call in (
        lambda: executor.forward(decode_step([1], 0)),
        lambda: executor.sample(np.zeros(1, np.int32), SampleArgs.greedy(1, 0)),
        lambda: executor.logprobs(np.zeros(1, np.int32), np.zeros(1, np.int32)),
        lambda: executor.download(np.zeros(1, np.int32)),
        lambda: executor.copy_blocks(0, np.zeros((1, 2), np.int32)),
    ):
        with pytest.raises(EngineError, match="closed"):
            call()
    assert device.closed


# --- plans


def with_launch(**changes: Any) -> dict[str, Any]:
    raw = raw_plan(1)
    launch = raw["sections"]["forward"][0]["cases"][0]["launches"][0]
    for name, value in changes.items():
        launch[name] = value if name != "args" else [*launch["args"][:-1], value]
    return raw


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (with_launch(kernel="backward.0"), "no kernel 'backward.0'"),
        (with_launch(grid=["X"]), "no size 'X'"),
        (with_launch(grid=[["cdiv", "TT", 4]]), "no size 'TT'"),
        (with_launch(args={"input": "kv0", "offset": "M1"}), "no size 'M1'"),
        (with_launch(args={"input": "logit_rows"}), "section forward: there is no array 'logit_rows'"),
        (with_launch(args={"buffer": 1}), "no buffer 1"),
        (with_launch(args={"weight": 7}), "no weight 7"),
        (with_launch(args={"input": "nothing"}), "no array 'nothing'"),
        (with_launch(args={"size": "T"}), "given a size"),
        ({**raw_plan(1), "sections": {"forward": []}}, "section sample_greedy: it is missing"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(weights, raw, match):
    wanted = compiled(Weights(weights, ["w"]), (None,), CONTEXT, raw_plan(1))
    given = compiled(Weights(weights, ["w"]), (None,), CONTEXT, raw)
    model = ModelKernels((None,), [44])
    device = FakeDevice(model.functions)
    with pytest.raises(ArtifactError, match=match):
        GpuExecutor(device, replace(wanted, plan=given.plan), Limits(40, 11, 5), [44])
    assert device.closed
