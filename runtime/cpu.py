"""The CPU target's executor: one shared library through the C ABI of docs/artifact.md, called with ctypes.

Everything a step needs is taken once, here: the arena (sizes from plan.json), the logits, and the KV pools,
all of them anonymous memory that costs nothing until it is touched.
"""

from __future__ import annotations

import ctypes as c
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from runtime.artifact import Artifact
from runtime.errors import ArtifactError, EngineError, ResourceError
from runtime.executor import SampleArgs, Sampled, broken_rows
from runtime.manifest import Fields, parse_json
from runtime.memory.mapping import anonymous
from runtime.scheduler import Limits
from runtime.step import Step
from runtime.weights import Weights

ABI = 3
MOVER_NICE = 10  # a tenth of a core beside a busy step, so that the copy is there within seconds


class CKVGroup(c.Structure):
    _fields_ = [
        ("data", c.c_void_p),
        ("slots", c.c_void_p),
        ("table", c.c_void_p),
        ("table_stride", c.c_int64),
    ]


class CStep(c.Structure):
    _fields_ = [
        ("num_tokens", c.c_int32), ("num_requests", c.c_int32), ("num_rows", c.c_int32),
        ("num_groups", c.c_int32),
        ("ids", c.c_void_p), ("pos", c.c_void_p),
        ("starts", c.c_void_p), ("lens", c.c_void_p), ("rows", c.c_void_p),
        ("groups", c.POINTER(CKVGroup)), ("arena", c.c_void_p), ("logits", c.c_void_p),
    ]  # fmt: skip


class CSampleArgs(c.Structure):
    _fields_ = [
        ("num_rows", c.c_int32), ("vocab_size", c.c_int32), ("num_top", c.c_int32), ("logits", c.c_void_p),
        ("temperature", c.c_void_p), ("top_p", c.c_void_p), ("min_p", c.c_void_p), ("top_k", c.c_void_p),
        ("seed", c.c_void_p), ("sample_index", c.c_void_p), ("position", c.c_void_p),
        ("ids", c.c_void_p), ("logprobs", c.c_void_p), ("top_ids", c.c_void_p), ("top_logprobs", c.c_void_p),
    ]  # fmt: skip


_P, _I = c.c_void_p, c.c_int32
_FUNCTIONS = {  # name: (result, arguments)
    "octavo_abi": (_I, []),
    "octavo_open": (_P, [c.POINTER(c.c_void_p), _I, _I]),
    "octavo_forward": (_I, [_P, c.POINTER(CStep)]),
    "octavo_sample": (_I, [_P, c.POINTER(CSampleArgs)]),
    "octavo_copy_blocks": (None, [_P, _I, _P, _P, _I]),
    "octavo_logprobs": (None, [_P, _P, _I, _P, _P]),
    "octavo_record": (None, [_P, _P, c.c_int64]),
    "octavo_set_weights": (None, [_P, c.POINTER(c.c_void_p)]),
    "octavo_close": (None, [_P]),
}


@dataclass(frozen=True)
class Plan:
    """plan.json: bytes of the arena per token, row and request of a step (rounded up to 16), and fixed."""

    per_token: int
    per_row: int
    per_request: int
    fixed: int

    @staticmethod
    def parse(data: bytes, where: str) -> Plan:
        arena = Fields(parse_json(data, where), where).object("arena")
        extra = set(arena.value) - {"T", "Q", "R", ""}
        if extra:
            raise ArtifactError(
                f"arena has an unknown term {min(extra)!r}", where=where, todo="Compile again"
            )
        values = (arena.integer(k, 0, 2**48) if k in arena.value else 0 for k in ("T", "Q", "R", ""))
        return Plan(*values)

    def arena_bytes(self, limits: Limits) -> int:
        def up(size: int) -> int:
            return -(-size // 16) * 16

        return (
            self.per_token * up(limits.max_step_tokens)
            + self.per_row * up(limits.max_rows)
            + self.per_request * up(limits.max_requests)
            + self.fixed
        )


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
            rows, vocab_size, width, _address(logits),
            _address(args.temperature), _address(args.top_p), _address(args.min_p), _address(args.top_k),
            _address(args.seed), _address(args.sample_index), _address(args.position),
            _address(out.ids), _address(out.logprobs) if args.logprobs else None,
            _address(out.top_ids), _address(out.top_logprobs),
        )  # fmt: skip
        return SampleCall(logits, args, out, call)


class CpuExecutor:
    """See runtime.executor.Executor. What is derived from a step's or a call's arrays is kept.

    Logits are the rows themselves, f32 [Q, V]. swap_blocks: places for preempted requests' blocks, in each
    group.
    """

    target = "cpu"

    def __init__(
        self,
        artifact: Artifact,
        limits: Limits,
        num_blocks: Sequence[int],
        threads: int,
        isa: str | None = None,
        *,
        swap_blocks: int = 0,
    ) -> None:
        target, model = artifact.cpu, artifact.manifest.model
        self.kernel = artifact.kernel(isa)
        plan = Plan.parse(artifact.read(target.plan), target.plan)
        self._library = _library(artifact, self.kernel.file)
        self._vocab_size = model.vocab_size
        self._arena = anonymous(plan.arena_bytes(limits), "the arena")
        self._logits = anonymous(limits.max_rows * model.vocab_size * 4, "the logits").view(np.float32)
        groups = artifact.manifest.kv_groups
        self._pools = [
            anonymous(count * group.block_bytes, "the KV cache").reshape(count, group.block_bytes)
            for count, group in zip(num_blocks, groups, strict=True)
        ]
        self._places = [
            anonymous(swap_blocks * group.block_bytes, "swapped blocks").reshape(-1, group.block_bytes)
            for group in (groups if swap_blocks else ())
        ]
        self._groups = (CKVGroup * len(self._pools))()
        self._weights = Weights(artifact.path(artifact.weights()), target.weight_order)
        self._engine: int | None = self._open(threads)
        self._step: Step | None = None
        self._sampling: SampleCall | None = None
        self._closing = threading.Event()
        self._mover = threading.Thread(target=self._move_weights, name="octavo-weights", daemon=True)
        held = [self._arena, self._logits, *self._pools, *self._places]
        if self._weights.deserve_copy(sum(array.nbytes for array in held)):
            self._mover.start()

    def _open(self, threads: int) -> int:
        addresses = self._weights.addresses
        engine = self._library.octavo_open(_pointers(addresses), len(addresses), threads)
        if not engine:
            self._weights.close()
            raise ResourceError(
                "the compiled code could not start",
                where=self.kernel.file,
                todo=f"Check memory, or use fewer than {threads} threads",
            )
        return engine

    def _move_weights(self) -> None:
        """Copy the weights into huge pages at a low priority, and use the copy from then on."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), MOVER_NICE)
        room = self._weights.copy(self._closing)
        if room is None:
            return
        before = self._weights.move_to(room)
        self._library.octavo_set_weights(self._handle, _pointers(self._weights.addresses))
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
            group.data, group.slots, group.table = _address(pool), _address(slots), _address(table)
            group.table_stride = table.shape[1]
        return CStep(
            len(step.ids), len(step.lens), len(step.rows), len(self._groups),
            _address(step.ids), _address(step.pos),
            _address(step.starts), _address(step.lens), _address(step.rows),
            self._groups, _address(self._arena), _address(self._logits),
        )  # fmt: skip

    def sample(self, logits: np.ndarray, args: SampleArgs) -> Sampled:
        last = self._sampling
        if last is None or last.args is not args or last.logits is not logits:
            last = self._sampling = SampleCall.of(logits, args)
        self._ok("octavo_sample", self._library.octavo_sample(self._handle, last.call))
        return last.out

    def logprobs(self, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
        out = np.empty(len(ids), np.float32)
        self._library.octavo_logprobs(self._handle, _address(logits), len(ids), _address(ids), _address(out))
        return out

    def broken_rows(self, logits: np.ndarray) -> list[int]:
        return broken_rows(logits)

    def download(self, logits: np.ndarray) -> np.ndarray:
        return logits

    def copy_blocks(self, group: int, pairs: np.ndarray) -> None:
        data = _address(self._pools[group])
        self._library.octavo_copy_blocks(self._handle, group, data, _address(pairs), len(pairs))

    def swap_out(self, group: int, pairs: np.ndarray) -> None:
        self._places[group][pairs[:, 1]] = self._pools[group][pairs[:, 0]]

    def swap_in(self, group: int, pairs: np.ndarray) -> None:
        self._pools[group][pairs[:, 1]] = self._places[group][pairs[:, 0]]

    def record(self, marks: np.ndarray | None) -> None:
        """Have every forward write its marks, i64 [threads, N, 2], which must stay; None: no longer."""
        address, width = (None, 0) if marks is None else (_address(marks), marks.shape[1])
        self._library.octavo_record(self._handle, address, width)

    def close(self) -> None:
        if self._engine is not None:
            self._closing.set()
            if self._mover.is_alive():
                self._mover.join()
            self._library.octavo_close(self._engine)
            self._engine = None
            self._weights.close()
            self._pools = self._places = []

    @property
    def _handle(self) -> int:
        if self._engine is None:
            raise EngineError("the executor is closed", todo="Load the artifact again")
        return self._engine

    def _ok(self, name: str, code: int) -> None:
        if code != 0:
            raise EngineError(
                f"{name} failed with code {code}",
                where=self.kernel.file,
                todo="Report it with the request that caused it",
            )


def _pointers(addresses: Sequence[int]) -> c.Array[c.c_void_p]:
    return (c.c_void_p * len(addresses))(*addresses)


def _address(array: np.ndarray) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


def _library(artifact: Artifact, name: str) -> c.CDLL:
    try:
        library = c.CDLL(_spelled_by_content(artifact.path(name), artifact.manifest.files[name].sha256))
        for function, (result, arguments) in _FUNCTIONS.items():
            entry = getattr(library, function)
            entry.restype, entry.argtypes = result, arguments
    except (OSError, AttributeError) as error:
        raise ArtifactError(
            f"cannot be used ({error})",
            where=name,
            todo="Rebuild the kernels from the bundled source on this machine",
        ) from error
    if library.octavo_abi() != ABI:
        raise ArtifactError(
            f"ABI {library.octavo_abi()}; this runtime speaks {ABI}",
            where=name,
            todo="Compile the model again",
        )
    return library


def _spelled_by_content(path: Path, sha256: str) -> str:
    """The same path, with 64 bits of the content's hash written as `/` and `/.`: the dynamic loader takes a
    path that it has loaded before for the same library, even when the file has been replaced meanwhile.
    """
    bits = f"{int(sha256[:16], 16):064b}"
    return str(path.parent) + "".join("/." if bit == "1" else "/" for bit in bits) + "/" + path.name
