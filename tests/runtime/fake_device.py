"""A device whose kernels are Python functions over host memory, and the model of tests/runtime/fake.py on it.

Nothing runs before synchronize(): whoever reads too early, or writes what a copy still reads, gets wrong
tokens. Fresh memory is poisoned.
"""

from __future__ import annotations

import ctypes
import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from runtime import sampler
from runtime.errors import EngineError, ResourceError
from runtime.executor import broken_rows
from runtime.gpu.compiled import Compiled
from runtime.gpu.device import KernelSpec
from runtime.gpu.plan import Plan
from runtime.manifest import KVGroup, Model
from runtime.step import Step
from runtime.weights import Weights
from tests.runtime.fake import BLOCK, VOCAB, FakeExecutor

GUARD = 256
TOKEN_BYTES = 16  # of the model's cache


def view(address: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array at an address."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype).reshape(shape)


class FakeDevice:
    """kernels: by function name, called with (grid, arguments). counts: of what was asked for, by kind."""

    name = "a device of Python"

    def __init__(self, kernels: dict[str, Callable[..., None]], free: int = 1 << 30) -> None:
        self.kernels, self.free_bytes = kernels, free
        self.counts: Counter[str] = Counter()
        self.memory: dict[int, np.ndarray] = {}
        self.closed = False
        self.fail: str | None = None
        self._queue: list[Callable[[], None]] = []
        self._recording: list[Callable[[], None]] | None = None

    def allocate(self, num_bytes: int, what: str) -> int:
        self.free_bytes -= num_bytes
        if self.free_bytes < 0:
            raise ResourceError(f"{num_bytes} bytes for {what}")
        raw = np.full(num_bytes + 3 * GUARD, 0xA5, np.uint8)
        address = raw.ctypes.data + GUARD + -(raw.ctypes.data + GUARD) % 256
        self.memory[address] = raw
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def free_memory(self) -> int:
        return self.free_bytes

    def host_array(self, num_bytes: int) -> np.ndarray:
        self.counts["host_array"] += 1
        return np.full(num_bytes, 0xA5, np.uint8)

    def free_host(self, array: np.ndarray) -> None:
        self.counts["free_host"] += 1

    def upload(self, address: int, source: np.ndarray) -> None:
        self._do("upload", lambda: ctypes.memmove(address, source.ctypes.data, source.nbytes))

    def download(self, target: np.ndarray, address: int) -> None:
        self._do("download", lambda: ctypes.memmove(target.ctypes.data, address, target.nbytes))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._do("copy", lambda: ctypes.memmove(target, source, num_bytes))

    def load(self, specs: Sequence[KernelSpec]) -> list[Any]:
        return [self.kernels[spec.function] for spec in specs]

    def launch(self, kernel: Any, grid: tuple[int, int, int], args: Sequence[int]) -> None:
        given = tuple(args)
        self._do("launch", lambda: kernel(grid, *given))

    def record(self, work: Callable[[], None]) -> Any:
        self.counts["record"] += 1
        self._recording = recorded = []
        work()
        self._recording = None
        device = self

        class Recorded:
            def replay(self) -> None:
                device._do("replay", lambda: [work() for work in recorded])

        return Recorded()

    def _do(self, kind: str, work: Callable[[], Any]) -> None:
        assert not self.closed
        if self._recording is not None:
            self._recording.append(work)
        else:
            self.counts[kind] += 1
            self._queue.append(work)

    def synchronize(self) -> None:
        self.counts["synchronize"] += 1
        queue, self._queue = self._queue, []
        if self.fail is not None:
            raise EngineError(self.fail)
        for work in queue:
            work()
        for raw in self.memory.values():
            assert (raw[:GUARD] == 0xA5).all() and (raw[-GUARD:] == 0xA5).all(), "wrote outside its memory"

    def close(self) -> None:
        self.closed = True
        self.memory.clear()


class ModelKernels:
    """The model as kernels. steps: sizes T, R, Q of each, with their padding. widths: of its tables.
    nan: as of FakeExecutor.
    """

    def __init__(self, windows: Sequence[int | None], num_blocks: Sequence[int]) -> None:
        self.windows, self.num_blocks = list(windows), list(num_blocks)
        self.steps: list[tuple[int, int, int]] = []
        self.widths: list[int] = []
        self.nan: int | None = None

    @property
    def functions(self) -> dict[str, Callable[..., None]]:
        names = ("forward", "greedy", "sample", "unfiltered", "top", "logprobs")
        return {name: getattr(self, f"_{name}") for name in names}

    def _forward(self, grid: Any, t: int, r: int, q: int, m: int, *pointers: int) -> None:
        ids, pos, starts, lens, rows, logits, weight, arena, *groups = pointers
        assert view(weight, (4,), np.float32).tolist() == [0, 1, 2, 3]
        view(arena, (t,), np.uint8)[:] = 1
        step = Step(
            view(ids, (t,), np.int32),
            view(pos, (t,), np.int32),
            view(starts, (r + 1,), np.int32),
            view(lens, (r,), np.int32),
            view(rows, (q,), np.int32),
            [view(a, (t,), np.int32) for a in groups[0::3]],
            [view(a, (r, m), np.int32) for a in groups[1::3]],
        )
        model = FakeExecutor([], list(self.windows))
        model.nan = self.nan
        held = zip(groups[2::3], self.num_blocks, strict=True)
        model.pools = [view(a, (n, BLOCK, 2), np.uint64) for a, n in held]
        self.steps.append((t, r, q))
        self.widths.append(m)
        real = _unpadded(step)
        out = view(logits, (q, VOCAB), np.float32)
        out[:] = np.inf  # of padding, which nothing may read
        out[: len(real.rows)] = model.download(model.forward(real))

    def _greedy(self, grid: Any, q: int, logits: int, rows: int, ids: int) -> None:
        self._choose(q, logits, rows, ids, lambda row, i: sampler.sample(row, temperature=0.0))

    def _sample(
        self, grid: Any, q: int, logits: int, rows: int, ids: int, logprobs: int, *given: int
    ) -> None:
        names = ("temperature", "top_p", "min_p", "top_k", "seed", "sample_index", "position")
        types = (np.float32,) * 3 + (np.int32, np.uint64, np.int32, np.int32)
        arrays = {
            name: view(a, (q,), type_).tolist() for name, a, type_ in zip(names, given, types, strict=True)
        }
        self._choose(
            q, logits, rows, ids, lambda row, i: sampler.sample(row, **{n: a[i] for n, a in arrays.items()})
        )
        self._logprobs(grid, q, logits, rows, ids, logprobs)

    def _unfiltered(
        self, grid: Any, q: int, logits: int, rows: int, ids: int, logprobs: int, *given: int
    ) -> None:
        temperature, top_p, _, top_k = (view(a, (q,), np.float32) for a in given[:4])
        assert ((temperature == 0) | ((top_p == 1) & (top_k.view(np.int32) == 0))).all()
        self._sample(grid, q, logits, rows, ids, logprobs, *given)

    def _choose(self, q: int, logits: int, rows: int, ids: int, choose: Any) -> None:
        found = _rows(q, logits, rows)
        broken = broken_rows(found)
        view(ids, (q,), np.int32)[:] = [-1 if i in broken else choose(found[i], i) for i in range(q)]

    def _top(self, grid: Any, q: int, k: int, logits: int, rows: int, ids: int, logprobs: int) -> None:
        found = [sampler.top(row, k) for row in _rows(q, logits, rows)]
        view(ids, (q, k), np.int32)[:] = [f[0] for f in found]
        view(logprobs, (q, k), np.float32)[:] = [f[1] for f in found]

    def _logprobs(self, grid: Any, q: int, logits: int, rows: int, ids: int, logprobs: int) -> None:
        found, given = _rows(q, logits, rows), view(ids, (q,), np.int32)
        view(logprobs, (q,), np.float32)[:] = sampler.log_softmax(found)[np.arange(q), given]


def _rows(q: int, logits: int, rows: int) -> np.ndarray:
    numbers = view(rows, (q,), np.int32)
    return view(logits, (int(numbers.max(initial=0)) + 1, VOCAB), np.float32)[numbers]


def _unpadded(step: Step) -> Step:
    """The step without padding, whose arrays hold what docs/artifact.md says."""
    tokens = int(step.starts[-1])
    requests = int((np.diff(step.starts) > 0).sum())
    assert (np.diff(step.starts)[requests:] == 0).all() and (step.lens[requests:] == 0).all()
    for array in step.slots:
        assert (array[tokens:] < 0).all()
    for array in (step.ids, step.pos, step.rows):
        assert (array >= 0).all() and (array < 2**20).all()
    padded = tokens < len(step.ids)
    assert padded == (requests < len(step.lens))
    return Step(
        step.ids[:tokens],
        step.pos[:tokens],
        step.starts[: requests + 1],
        step.lens[:requests],
        step.rows[:requests] if padded else step.rows,
        [array[:tokens] for array in step.slots],
        [array[:requests] for array in step.tables],
    )


_PARAMETERS = ["temperature", "top_p", "min_p", "top_k", "seed", "sample_index", "position"]
_CALLS: dict[str, tuple[str, list[str], list[str]]] = {  # section: (function, sizes, inputs)
    "sample_greedy": ("greedy", ["Q"], ["logits", "logit_rows", "sampled_ids"]),
    "sample": ("sample", ["Q"], ["logits", "logit_rows", "sampled_ids", "sampled_logprobs", *_PARAMETERS]),
    "sample_one_filter": (
        "sample", ["Q"], ["logits", "logit_rows", "sampled_ids", "sampled_logprobs", *_PARAMETERS],
    ),
    "sample_unfiltered": (
        "unfiltered", ["Q"], ["logits", "logit_rows", "sampled_ids", "sampled_logprobs", *_PARAMETERS],
    ),
    "top": ("top", ["Q", "K"], ["logits", "logit_rows", "top_ids", "top_logprobs"]),
    "logprobs": ("logprobs", ["Q"], ["logits", "logit_rows", "given_ids", "given_logprobs"]),
}  # fmt: skip


def raw_plan(num_groups: int) -> dict[str, Any]:
    """plan.json of the model: one launch per section."""
    inputs = ["ids", "pos", "starts", "lens", "rows", "logits"]
    args: list[dict[str, Any]] = [{"input": name, "offset": 0} for name in inputs]
    args += [{"weight": 0, "offset": 0}, {"buffer": 0, "offset": 0}]
    for g in range(num_groups):
        args += [{"input": f"{name}{g}", "offset": 0} for name in ("slots", "table", "kv")]
    sections = {"forward": [_entry("forward", ["T", "R", "Q", "M0"], args)]}
    for section, (function, sizes, names) in _CALLS.items():
        sections[section] = [_entry(function, sizes, [{"input": name, "offset": 0} for name in names])]
    return {"buffers": [{"T": 1, "": 16}], "sections": sections, "sample_scratch": {"Q": 8, "": 16}}


def _entry(function: str, sizes: list[str], args: list[dict[str, Any]]) -> dict[str, Any]:
    launch = {"kernel": f"{function}.0", "grid": [1], "args": [{"size": size} for size in sizes] + args}
    return {"op": function, "loc": "", "cases": [{"when": None, "launches": [launch]}]}


def specs(raw: dict[str, Any]) -> list[KernelSpec]:
    """The plan's kernels."""
    found: dict[str, KernelSpec] = {}
    for entries in raw["sections"].values():
        for launch in (x for entry in entries for case in entry["cases"] for x in case["launches"]):
            signature = tuple(
                (f"a{i}", "i32" if "size" in arg else "*u8") for i, arg in enumerate(launch["args"])
            )
            name, function = launch["kernel"], launch["kernel"].split(".")[0]
            found[name] = KernelSpec(name, function, function, signature, (), 1, 0, b"")
    return list(found.values())


def compiled(
    weights: Weights, windows: Sequence[int | None], max_context: int, raw: dict[str, Any]
) -> Compiled:
    plan = Plan.parse(json.dumps(raw).encode(), "plan.json")
    groups = [KVGroup(1, window, BLOCK, BLOCK * TOKEN_BYTES, TOKEN_BYTES) for window in windows]
    return Compiled("fake", plan, specs(raw), weights, Model("f32", VOCAB, max_context, None, ()), groups)
