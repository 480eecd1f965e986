"""A compiled forward: one shared library, called through the C ABI, with its weights and its workspace.

The blocks that it reads and writes are another's, so that two of them can work on the same ones.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from runtime.artifact import Artifact
from runtime.cpu.abi import CKVGroup, CSampleArgs, CStep, address, open_library, pointers
from runtime.cpu.plan import Plan
from runtime.errors import EngineError, ResourceError
from runtime.executor import SampleArgs, Sampled, broken_rows
from runtime.limits import Limits
from runtime.manifest import CpuTarget, Kernel
from runtime.memory.mapping import anonymous
from runtime.step import Step
from runtime.weights import Weights

MOVER_NICE = 10  # a tenth of a core beside a busy step, so that the copy is there within seconds


@dataclass(frozen=True, slots=True)
class SampleCall:
    """A call's arguments and results, which are those of the next call with the same arrays too."""

    logits: np.ndarray
    args: SampleArgs
    out: Sampled
    call: CSampleArgs

    @staticmethod
    def of(logits: np.ndarray, args: SampleArgs) -> SampleCall:
        (rows, vocab_size), width = logits.shape, args.num_top
        out = Sampled(
            np.empty(rows, np.int32),
            np.empty(rows, np.float32),
            np.empty((rows, width), np.int32),
            np.empty((rows, width), np.float32),
        )
        call = CSampleArgs(
            rows, vocab_size, width, address(logits),
            address(args.temperature), address(args.top_p), address(args.min_p), address(args.top_k),
            address(args.seed), address(args.sample_index), address(args.position),
            address(out.ids), address(out.logprobs) if args.logprobs else None,
            address(out.top_ids), address(out.top_logprobs),
        )  # fmt: skip
        return SampleCall(logits, args, out, call)


class CpuForward:
    """Opened with the pools of each KV group, bytes [blocks, block_bytes], which must stay.

    beside: another one, whose threads it works with. What is derived from a step's or a call's arrays is
    kept. Logits are the rows themselves, f32 [Q, V].
    """

    def __init__(
        self,
        artifact: Artifact,
        target: CpuTarget,
        kernel: Kernel,
        limits: Limits,
        pools: Sequence[np.ndarray],
        threads: int,
        beside: CpuForward | None = None,
    ) -> None:
        self.kernel, self._pools = kernel, pools
        plan = Plan.parse(artifact.read(target.plan), target.plan)
        self._library = open_library(artifact, kernel.file, draft=beside is not None)
        self._vocab_size = artifact.manifest.model.vocab_size
        self._arena = anonymous(plan.arena_bytes(limits), "the arena")
        self._logits = anonymous(limits.max_rows * self._vocab_size * 4, "the logits").view(np.float32)
        self._groups = (CKVGroup * len(pools))()
        assert target.weights is not None, "shapes alone are not opened"
        self._weights = Weights(artifact.path(target.weights), target.weight_order, plan.weights)
        self._engine: int | None = self._open(threads if beside is None else 1)
        if beside is not None:
            self._library.octavo_share_threads(self._handle, beside._handle)
        self._step: Step | None = None
        self._sampling: SampleCall | None = None
        self._closing = threading.Event()
        self._mover = threading.Thread(target=self._move_weights, name="octavo-weights", daemon=True)

    def _open(self, threads: int) -> int:
        addresses = self._weights.addresses
        engine = self._library.octavo_open(pointers(addresses), len(addresses), threads)
        if not engine:
            self._weights.close()
            fewer = f", use fewer than {threads} threads" if threads > 1 else ""
            raise ResourceError(
                "the compiled code could not start",
                where=self.kernel.file,
                todo=f"Check memory{fewer}, or compile the model again",
            )
        return engine

    def move_weights(self, taken: int) -> None:
        """Begin to copy the weights into huge pages, where they deserve it. taken: bytes that others hold and
        the system counts as free still."""
        if self._weights.deserve_copy(taken + self._arena.nbytes + self._logits.nbytes):
            self._mover.start()

    def _move_weights(self) -> None:
        """Copy the weights into huge pages at a low priority, and use the copy from then on."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), MOVER_NICE)
        room = self._weights.copy(self._closing)
        if room is None:
            return
        before = self._weights.move_to(room)
        self._library.octavo_set_weights(self._handle, pointers(self._weights.addresses))
        del before  # what the step that ran until now has read

    def forward(self, step: Step) -> np.ndarray:
        if step is not self._step:
            self._step, self._call = step, self._step_call(step)
            rows = len(step.rows)
            self._rows = self._logits[: rows * self._vocab_size].reshape(rows, self._vocab_size)
        self._ok("octavo_forward", self._library.octavo_forward(self._handle, self._call))
        return self._rows

    def _step_call(self, step: Step) -> CStep:
        for group, pool, slots, table in zip(self._groups, self._pools, step.slots, step.tables, strict=True):
            group.data, group.slots, group.table = address(pool), address(slots), address(table)
            group.table_stride = table.shape[1]
        return CStep(
            len(step.ids), len(step.lens), len(step.rows), len(self._groups),
            address(step.ids), address(step.pos),
            address(step.starts), address(step.lens), address(step.rows),
            self._groups, address(self._arena), address(self._logits),
        )  # fmt: skip

    def sample(self, logits: np.ndarray, args: SampleArgs) -> Sampled:
        last = self._sampling
        if last is None or last.args is not args or last.logits is not logits:
            last = self._sampling = SampleCall.of(logits, args)
        self._ok("octavo_sample", self._library.octavo_sample(self._handle, last.call))
        return last.out

    def logprobs(self, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
        out = np.empty(len(ids), np.float32)
        self._library.octavo_logprobs(self._handle, address(logits), len(ids), address(ids), address(out))
        return out

    def broken_rows(self, logits: np.ndarray) -> list[int]:
        return broken_rows(logits)

    def download(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def overwrite(self, logits: np.ndarray, rows: np.ndarray, values: np.ndarray) -> None:
        logits[rows] = values

    def record(self, marks: np.ndarray | None) -> None:
        """Have every forward write its marks, i64 [threads, N, 2], which must stay; None: no longer."""
        start, width = (None, 0) if marks is None else (address(marks), marks.shape[1])
        self._library.octavo_record(self._handle, start, width)

    def close(self) -> None:
        if self._engine is not None:
            self._closing.set()
            if self._mover.is_alive():
                self._mover.join()
            self._library.octavo_close(self._engine)
            self._engine = None
            self._weights.close()
            self._pools = []

    @property
    def _handle(self) -> int:
        if self._engine is None:
            raise EngineError("the executor is closed", where="engine", todo="Load the artifact again")
        return self._engine

    def _ok(self, name: str, code: int) -> None:
        if code != 0:
            raise EngineError(
                f"{name} failed with code {code}",
                where=self.kernel.file,
                todo="Report it with the request that caused it",
            )
