"""The GPU targets' executor: a plan's launches over a device, with all memory taken once, here.

A step is one copy to the device and one replay of a graph (of a decode step) or its launches one by one.
Logits stay on the device: what stands for them are the numbers of their rows. The host waits only for what
it reads, the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.errors import EngineError
from runtime.executor import Logits, SampleArgs, Sampled, broken_rows
from runtime.gpu.bounds import check_bounds
from runtime.gpu.cache import BlockPool
from runtime.gpu.compiled import Compiled
from runtime.gpu.device import Device
from runtime.gpu.memory import upload_weights, weight_offsets
from runtime.gpu.program import Memory, Program
from runtime.gpu.sampler import GpuSampler, sampler_given
from runtime.gpu.steps import Steps, Tables, step_given
from runtime.kv.budget import swap_places
from runtime.limits import Limits
from runtime.memory.plan import Place
from runtime.step import Step


class GpuExecutor:
    """See runtime.executor.Executor. Closes the device, on success or failure.

    buckets: sizes that decode steps are padded to. swap_blocks: blocks of a group that the host has room for,
    see runtime.kv.budget.swap_places.
    """

    def __init__(
        self,
        device: Device,
        compiled: Compiled,
        limits: Limits,
        num_blocks: Sequence[int],
        *,
        buckets: Sequence[int] | None = None,
        swap_blocks: int = 0,
    ) -> None:
        self.target, self._vocab_size = compiled.target, compiled.model.vocab_size
        self._device: Device | None = device
        try:
            self._open(device, compiled, limits, num_blocks, buckets, swap_blocks)
        except BaseException:
            self.close()
            raise
        finally:
            compiled.weights.close()

    def _open(
        self,
        device: Device,
        compiled: Compiled,
        limits: Limits,
        num_blocks: Sequence[int],
        buckets: Sequence[int] | None,
        swap_blocks: int,
    ) -> None:
        place = Place(device.name, device.free_memory(), None)
        compiled.memory(limits, num_blocks, place).check()
        program = self._program(device, compiled, limits)
        check_bounds(compiled.plan, compiled.kernels, compiled.rooms(limits, num_blocks))
        places = swap_places([group.is_single for group in compiled.groups], swap_blocks, limits)
        self._pools = [
            BlockPool(device, count, group.block_bytes, held)
            for count, group, held in zip(num_blocks, compiled.groups, places, strict=True)
        ]
        self._logits = device.allocate(limits.max_rows * self._vocab_size * 4, "the logits")
        caches = {f"kv{group}": pool.address for group, pool in enumerate(self._pools)}
        inputs = {**caches, "logits": self._logits}
        tables = Tables(len(self._pools), compiled.table_width, compiled.block)
        self._steps = Steps(device, program, limits, tables, inputs, buckets)
        self._sampler = GpuSampler(device, program, limits.max_rows, self._vocab_size, self._logits)
        self._numbers = np.arange(limits.max_rows, dtype=np.int32)
        self._started = False  # whether the step's arrays are still being read

    def _program(self, device: Device, compiled: Compiled, limits: Limits) -> Program:
        """The kernels, over the arena and the weights."""
        offsets, size = weight_offsets([tensor.size for tensor in compiled.weights.tensors])
        weights = upload_weights(device, compiled.weights, device.allocate(size, "the weights"), offsets)
        arena = [device.allocate(size, "the arena") for size in compiled.buffer_bytes(limits)]
        given = {"forward": step_given(len(compiled.groups)), **sampler_given()}
        return Program(device, compiled.plan, compiled.kernels, Memory(arena, weights), given)

    def forward(self, step: Step) -> Logits:
        device = self._open_device
        if self._started:
            device.synchronize()
        self._started = True
        self._steps.start(step)
        return self._numbers[: len(step.rows)]

    def sample(self, logits: Logits, args: SampleArgs) -> Sampled:
        self._open_device  # noqa: B018 - raises where it is closed
        sampled = self._sampler.sample(logits, args)
        self._started = False
        if len(sampled.ids) and sampled.ids.min() < 0:
            raise EngineError(
                "a row of logits has no largest number: NaN or infinity",
                where=self.target,
                todo="Report it with the request that caused it",
            )
        return sampled

    def logprobs(self, logits: Logits, ids: np.ndarray) -> np.ndarray:
        self._open_device  # noqa: B018
        found = self._sampler.logprobs(logits, ids)
        self._started = False
        return found

    def broken_rows(self, logits: Logits) -> list[int]:
        return broken_rows(self.download(logits))

    def download(self, logits: Logits) -> np.ndarray:
        device = self._open_device
        rows = np.empty((len(logits), self._vocab_size), np.float32)
        for row, number in zip(rows, logits.tolist(), strict=True):
            device.download(row.view(np.uint8), self._logits + number * row.nbytes)
        device.synchronize()
        return rows

    def overwrite(self, logits: Logits, rows: np.ndarray, values: np.ndarray) -> None:
        device = self._open_device
        for row, number in zip(values, logits[rows].tolist(), strict=True):
            device.upload(self._logits + number * row.nbytes, row.view(np.uint8))
        device.synchronize()

    def copy_blocks(self, group: int, pairs: np.ndarray) -> None:
        self._open_device  # noqa: B018
        self._pools[group].copy(pairs)

    def swap_out(self, group: int, pairs: np.ndarray) -> None:
        self._open_device  # noqa: B018
        self._pools[group].swap_out(pairs)

    def swap_in(self, group: int, pairs: np.ndarray) -> None:
        self._open_device  # noqa: B018
        self._pools[group].swap_in(pairs)

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None

    @property
    def _open_device(self) -> Device:
        if self._device is None:
            raise EngineError("the executor is closed", where="engine", todo="Load the artifact again")
        return self._device
