"""Octavo's side: an artifact of shapes alone, opened with random weights, and its kernels and steps timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, cast

import numpy as np

from codegen.costs import Costs
from codegen.triton import find_device
from codegen.triton.costs import bound, costs_of
from gpubench.workloads import Workload
from ir.text import parse
from runtime import Artifact
from runtime.executor import SampleArgs
from runtime.gpu.compiled import Compiled
from runtime.gpu.device import Device
from runtime.gpu.driver import DriverDevice
from runtime.gpu.executor import GpuExecutor
from runtime.gpu.interpret import InterpretedDevice
from runtime.gpu.kernels import parse_kernels
from runtime.gpu.memory import upload_weights, weight_offsets
from runtime.gpu.plan import Plan
from runtime.gpu.program import Memory, Program
from runtime.gpu.staging import Area
from runtime.gpu.steps import Form, step_bytes, step_given, step_shapes
from runtime.gpu.targets import find_api
from runtime.limits import Limits
from runtime.manifest import GpuTarget

STEP_TOKENS = 2048


class RandomWeights:
    """In place of runtime.weights.Weights: arrays of the sizes there are, all of them one array's beginning.

    Its elements are normal bf16, two of which make an f32 of about the same size.
    """

    def __init__(self, sizes: Sequence[int], scale: float = 0.02) -> None:
        rng = np.random.default_rng(0)
        piece = (rng.standard_normal(1 << 20) * scale).astype(np.float32).view(np.uint32) >> 16
        every = np.resize(piece.astype(np.uint16).view(np.uint8), max(sizes, default=0))
        self.tensors = [every[:size] for size in sizes]

    def close(self) -> None:
        self.tensors = []


@dataclass(frozen=True)
class Opened:
    """An artifact on its device. costs: of its kernels, in the plan's order."""

    artifact: Artifact
    target: GpuTarget
    device: Device
    compiled: Compiled
    costs: Costs

    @property
    def limits(self) -> Limits:
        tokens = min(STEP_TOKENS, self.compiled.model.max_context)
        return Limits(tokens, min(64, tokens), 0)


@contextmanager
def opened(artifact: Artifact, name: str) -> Iterator[Opened]:
    """Raises runtime.gpu.vendor.Unavailable where the device is missing."""
    target = cast(GpuTarget, artifact.target(name))
    plan = Plan.parse(artifact.read(target.plan), target.plan)
    folder = PurePosixPath(target.kernels).parent
    kernels = parse_kernels(
        artifact.read(target.kernels), target.kernels, lambda file: artifact.read(str(folder / file))
    )
    costs = costs_of(parse(artifact.read(target.graph).decode()), find_device(name))
    sizes = {w.name: w.bytes for kernel in costs.kernels for w in kernel.weights}
    weights = RandomWeights([sizes[weight] for weight in target.weight_order])
    model, groups = artifact.manifest.model, artifact.manifest.kv_groups
    compiled = Compiled(name, plan, kernels, cast(Any, weights), model, groups)
    if target.backend == "interpret":
        device: Device = InterpretedDevice(artifact.path(target.source))
    else:
        device = DriverDevice(find_api(target.backend))
    try:
        yield Opened(artifact, target, device, compiled, costs)
    finally:
        device.close()


# --- kernels, one by one


@dataclass(frozen=True)
class KernelTime:
    """Of one op's launches, a mean over the layers that have it and run the same kernels for it."""

    op: str
    kernels: tuple[str, ...]
    count: int
    operations: int
    time_us: float
    bound: str
    bound_us: float


def time_kernels(opened: Opened, workload: Workload, repeats: int) -> list[KernelTime]:
    """Each op's launches in all layers as one recorded graph: weights come from memory, as in a step."""
    program, inputs, sizes = _prepared(opened, workload)
    device, costs = find_device(opened.target.name), opened.costs
    counted, entries = costs.step(workload.shape), program.plan.sections["forward"]
    alike: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for number, kernel in enumerate(costs.kernels):
        names = tuple(launch.kernel for launch in entries[number].choose(sizes))
        alike.setdefault((kernel.label, names), []).append(number)
    found: list[KernelTime] = []
    for (label, names), numbers in alike.items():
        time_s = _time(opened.device, program, numbers, sizes, inputs, repeats)
        bounds = [bound(counted[n], device) for n in numbers]
        found.append(KernelTime(
            label, names, len(numbers), counted[numbers[0]].operations, time_s / len(numbers) * 1e6,
            max(bounds, key=lambda each: each[1])[0],
            statistics.fmean(seconds for _, seconds in bounds) * 1e6,
        ))  # fmt: skip
    return found


def _time(
    device: Device, program: Program, numbers: Sequence[int], sizes: Any, inputs: Any, repeats: int
) -> float:
    """Median seconds of all launches of these entries."""
    recorded = device.record(lambda: program.run("forward", sizes, inputs, numbers))
    return median_s(recorded.replay, device.synchronize, repeats)


def median_s(work: Callable[[], object], wait: Callable[[], None], repeats: int) -> float:
    """Of a number of runs in a row that takes a few milliseconds, after one that is not counted."""
    start = time.perf_counter()
    work()
    wait()
    once = time.perf_counter() - start
    inner = max(1, min(50, int(5e-3 / max(once, 1e-6)))) if repeats > 1 else 1
    times: list[float] = []
    for _ in range(repeats):
        wait()
        start = time.perf_counter()
        for _ in range(inner):
            work()
        wait()
        times.append((time.perf_counter() - start) / inner)
    return statistics.median(times)


def _prepared(opened: Opened, workload: Workload) -> tuple[Program, dict[str, int], dict[str, int]]:
    """The kernels over their memory, the step's arrays there; and the inputs' addresses, and sizes."""
    device, compiled, limits = opened.device, opened.compiled, opened.limits
    groups, model = list(compiled.groups), compiled.model
    offsets, total = weight_offsets([tensor.size for tensor in compiled.weights.tensors])
    weights = upload_weights(device, compiled.weights, device.allocate(total, "the weights"), offsets)
    buffers = [device.allocate(size, "the arena") for size in compiled.buffer_bytes(limits)]
    memory, given = Memory(buffers, weights), {"forward": step_given(len(groups))}
    program = Program(device, compiled.plan, compiled.kernels, memory, given)
    blocks, shape = workload.blocks(groups[0].block), workload.shape
    size_of = (len(workload.step(blocks, groups, model.vocab_size).ids), workload.requests, workload.requests)
    area = Area.of(device, step_bytes(limits, len(groups), compiled.table_width), "the step's arrays")
    staged = area.lay_out(step_shapes(size_of, len(groups), compiled.table_width))
    Form(staged, {}).upload(workload.step(blocks, groups, model.vocab_size))
    device.synchronize()
    inputs = dict(staged.addresses) | {
        f"kv{g}": device.allocate(workload.requests * blocks * group.block_bytes, "the cache")
        for g, group in enumerate(groups)
    }
    inputs["logits"] = device.allocate(workload.requests * model.vocab_size * 4, "the logits")
    return program, inputs, shape.sizes | {f"M{g}": compiled.table_width for g in range(len(groups))}


# --- whole steps


def time_steps(opened: Opened, workloads: Sequence[Workload], repeats: int) -> dict[str, float]:
    """Seconds of a step and the choice of its tokens by the executor, by workload. Closes the device."""
    groups, vocab_size = list(opened.compiled.groups), opened.compiled.model.vocab_size
    block, limits = groups[0].block, opened.limits
    counts = [max(w.requests * w.blocks(block) for w in workloads)] * len(groups)
    executor = GpuExecutor(opened.device, opened.compiled, limits, counts)
    found: dict[str, float] = {}
    try:
        for workload in workloads:
            blocks = workload.blocks(block)
            for fill in workload.filling(limits.max_step_tokens):
                executor.forward(fill.step(blocks, groups, vocab_size))
            pairs = [(i, r * blocks + i) for r in range(1, workload.requests) for i in range(blocks)]
            for group in range(len(groups) if pairs else 0):
                executor.copy_blocks(group, np.array(pairs, np.int32))
            step = workload.step(blocks, groups, vocab_size)
            greedy = SampleArgs.greedy(workload.requests, 0)
            run = lambda step=step, greedy=greedy: executor.sample(executor.forward(step), greedy)  # noqa: E731
            found[workload.name] = median_s(run, lambda: None, repeats)
    finally:
        executor.close()
    return found
