"""A small model on a GPU, through its driver, against float64; and in the interpreter, on any machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from codegen import triton
from codegen.evaluate import Evaluator
from codegen.kv_block import block_bytes
from codegen.triton.build import build_kernels, kernels_json
from codegen.triton.devices import derived_device
from ir.graph import Graph, tensor_of
from ir.types import KV
from runtime.gpu.compiled import Compiled
from runtime.gpu.device import Device
from runtime.gpu.driver import DriverDevice
from runtime.gpu.executor import GpuExecutor
from runtime.gpu.interpret import InterpretedDevice
from runtime.gpu.kernels import parse_kernels
from runtime.gpu.plan import Plan
from runtime.gpu.targets import find_api
from runtime.gpu.vendor import Api, Unavailable
from runtime.limits import Limits
from runtime.manifest import KVGroup, Model
from runtime.step import Step
from tests.codegen.harness import (
    Array,
    Arrays,
    Chunk,
    empty_states,
    lower,
    pack_step,
    random_weights,
    reference_step,
)
from tests.codegen.test_forward import V, graph
from tests.triton import test_recurrence as recurrence

BLOCKS = 12
TABLE_A, TABLE_B = [3, 5, 7], [2, 9]
A, B = ([int(i) for i in np.random.default_rng(seed).integers(0, V, 40)] for seed in (1, 2))
STEPS = [
    [Chunk(TABLE_A, 0, A[:33]), Chunk(TABLE_B, 0, B[:17])],
    [Chunk(TABLE_A, 33, A[33:34]), Chunk(TABLE_B, 17, B[17:18])],  # a decode step
    [Chunk(TABLE_A, 34, A[34:35]), Chunk(TABLE_B, 18, B[18:22])],  # a mixed one
]


class _Held:
    """In place of runtime.weights.Weights."""

    def __init__(self, tensors: list[np.ndarray]) -> None:
        self.tensors = tensors

    def close(self) -> None:
        pass


def opened(
    target: triton.Device,
    folder: Path,
    api: Api | None,
    lowered: Graph,
    weights: dict[str, Array],
) -> GpuExecutor:
    generated = triton.generate(lowered, target)
    (folder / "kernels").mkdir()
    (folder / "kernels/kernels.py").write_text(generated.source)
    listed = kernels_json(build_kernels(folder, generated.kernels, target), target)
    specs = parse_kernels(
        json.dumps(listed).encode(), "kernels.json", lambda name: (folder / name).read_bytes()
    )
    evaluator = Evaluator(lowered, Arrays(weights))
    packed = [
        np.ascontiguousarray(np.asarray(evaluator.whole(w.source)).astype(w.dtype.numpy))
        .view(np.uint8)
        .ravel()
        for w in generated.weights
    ]
    states = [v.type for v in lowered.inputs if isinstance(v.type, KV)]
    groups = [
        KVGroup(kv.layers, kv.window, kv.block, block_bytes(kv), kv.bytes_per_token, state=kv.state)
        for kv in states
    ]
    plan = Plan.parse(json.dumps(generated.plan).encode(), "plan.json")
    width = cast(int, tensor_of(lowered.outputs[0]).shape[-1])
    model = Model("f32", width, 1024, None, ())
    compiled = Compiled(target.target, plan, specs, cast(Any, _Held(packed)), model, groups)
    device: Device = InterpretedDevice(folder / "kernels/kernels.py") if api is None else DriverDevice(api)
    return GpuExecutor(device, compiled, Limits(64, 8, 64), [BLOCKS] * len(groups))


def check(target: triton.Device, folder: Path, api: Api | None) -> None:
    """Logits of each step, of all its tokens."""
    lowered = lower(graph(), "gpu")
    weights = random_weights(lowered, np.random.default_rng(0))
    executor, reference = opened(target, folder, api, lowered, weights), empty_states(lowered, BLOCKS)
    try:
        for chunks in STEPS:
            step = _step(chunks, len(reference))
            got = executor.download(executor.forward(step))
            want, reference = reference_step(lowered, weights, reference, chunks, list(step.rows))
            assert np.abs(got - want).max() < 2e-4 * want.std()
    finally:
        executor.close()


def check_recurrence(name: str, target: triton.Device, folder: Path, api: Api | None) -> None:
    """What a recurrence gives is the definition's, and of the same bits in chunks of any size."""
    case = recurrence.CASES[name]
    lowered, weights = lower(recurrence.graph(case), "gpu"), recurrence.weights(case, 0)
    executor, ids = opened(target, folder, api, lowered, weights), recurrence.random_ids(4, 51)
    table = list(range(4, 4 + -(-51 // case.block)))
    try:
        found: list[Array] = []
        for counts in ([51], [17, 16, 15, 3], [33, 1, 1, 1, 15]):
            chunks = [
                Chunk(table, end - n, ids[end - n : end])
                for n, end in zip(counts, np.cumsum(counts), strict=True)
            ]
            steps = [_step([chunk], 1, case.block) for chunk in chunks]
            found.append(np.concatenate([executor.download(executor.forward(step)) for step in steps]))
    finally:
        executor.close()
    np.testing.assert_allclose(found[0], recurrence.expected(case, weights, ids).y, 1e-3, 1e-4)
    assert found[0].tobytes() == found[1].tobytes() == found[2].tobytes()


def _step(chunks: list[Chunk], groups: int, block: int = 16) -> Step:
    packed = pack_step(chunks, 8, block)
    decodes = all(len(chunk.ids) == 1 for chunk in chunks)
    rows = np.arange(len(packed["ids"]), dtype=np.int32) if not decodes else packed["starts"][:-1]
    slots, tables = [packed["slots"]] * groups, [np.maximum(packed["table"], 0)] * groups
    return Step(packed["ids"], packed["pos"], packed["starts"], packed["lens"], rows, slots, tables)


RECURRENCES = ("gated_delta", "channels", "rates_and_beta", "small_blocks")


def gpu(backend: str) -> tuple[triton.Device, Api]:
    try:
        api = find_api(backend)
    except Unavailable as error:
        pytest.skip(f"needs a GPU: {error}")
    return derived_device(f"{backend}:{api.arch}"), api


def test_in_the_interpreter(tmp_path: Path) -> None:
    check(triton.find_device("triton-interpret"), tmp_path, None)


def test_a_recurrence_in_the_interpreter(tmp_path: Path) -> None:
    check_recurrence(RECURRENCES[0], triton.find_device("triton-interpret"), tmp_path, None)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_on_a_gpu(tmp_path: Path, backend: str) -> None:
    target, api = gpu(backend)
    check(target, tmp_path, api)


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECURRENCES)
@pytest.mark.parametrize("backend", ["cuda", "hip"])
def test_a_recurrence_on_a_gpu(tmp_path: Path, backend: str, name: str) -> None:
    target, api = gpu(backend)
    check_recurrence(name, target, tmp_path, api)
