"""The step's arrays on a device, and what runs over them: launches bound to a step's sizes.

Steps in which every request has one token and one row, as in decode, are padded to a few sizes (buckets), and
each of these is recorded once. Padding writes nothing: its slots are negative and its requests empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.gpu.device import Device, Graph
from runtime.gpu.program import Program, Work
from runtime.gpu.staging import Area, Shapes, Staged, staged_bytes
from runtime.scheduler import Limits
from runtime.step import Step

MAX_FORMS = 64  # of sizes that are not a bucket's; those used least recently are forgotten


def decode_buckets(most: int) -> tuple[int, ...]:
    """Sizes of decode steps up to `most` requests."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32)]
    return (*(size for size in sizes if size < most), most)


def step_shapes(sizes: tuple[int, int, int], num_groups: int, width: int) -> Shapes:
    """sizes: T, R, Q. width: of tables."""
    t, r, q = sizes
    shapes: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {
        "ids": ((t,), np.int32),
        "pos": ((t,), np.int32),
        "starts": ((r + 1,), np.int32),
        "lens": ((r,), np.int32),
        "rows": ((q,), np.int32),
    }
    for group in range(num_groups):
        shapes[f"slots{group}"] = (t,), np.int32
        shapes[f"table{group}"] = (r, width), np.int32
    return shapes


def step_bytes(limits: Limits, num_groups: int, width: int) -> int:
    sizes = limits.max_step_tokens, limits.max_requests, limits.max_rows
    return staged_bytes(step_shapes(sizes, num_groups, width))


@dataclass(frozen=True, slots=True)
class Form:
    """Steps of certain sizes. graph: the launches as one, where they are recorded.

    numbers: 0 to Q, which stand for the rows of logits.
    """

    staged: Staged
    launches: Sequence[Work]
    graph: Graph | None
    numbers: np.ndarray

    def start(self, step: Step) -> None:
        """Copy the step to the device, and start it. What is beyond its sizes becomes padding."""
        arrays = self.staged.arrays
        tokens, requests, rows = len(step.ids), len(step.lens), len(step.rows)
        _fill(arrays["ids"], step.ids, tokens, 0)
        _fill(arrays["pos"], step.pos, tokens, 0)
        _fill(arrays["starts"], step.starts, requests + 1, tokens)
        _fill(arrays["lens"], step.lens, requests, 0)
        _fill(arrays["rows"], step.rows, rows, 0)
        for group, (slots, table) in enumerate(zip(step.slots, step.tables, strict=True)):
            _fill(arrays[f"slots{group}"], slots, tokens, -1)
            held = arrays[f"table{group}"]
            held[:requests, : table.shape[1]] = table
            held[requests:] = 0
        self.staged.upload()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.launch()

    def launch(self) -> None:
        for launch in self.launches:
            launch()


def _fill(target: np.ndarray, source: np.ndarray, count: int, rest: int) -> None:
    target[:count] = source
    target[count:] = rest


class StepForms:
    """Forms by sizes. inputs: addresses of what steps share, the caches and the logits."""

    def __init__(
        self,
        device: Device,
        program: Program,
        limits: Limits,
        num_groups: int,
        width: int,
        inputs: Mapping[str, int],
        buckets: Sequence[int] | None = None,
    ) -> None:
        self._device, self._program, self._inputs = device, program, inputs
        self._num_groups, self._width = num_groups, width
        self._area = Area.of(device, step_bytes(limits, num_groups, width), "the step's arrays")
        program.require(["forward"])
        most = min(limits.max_step_tokens, limits.max_requests)
        given = decode_buckets(most) if buckets is None else buckets
        self._buckets = [size for size in given if size <= most]
        self._numbers = np.arange(limits.max_rows, dtype=np.int32)
        self._recorded: dict[int, Form] = {}
        self._forms: dict[tuple[int, int, int], Form] = {}

    def find(self, step: Step) -> Form:
        tokens, requests, rows = len(step.ids), len(step.lens), len(step.rows)
        if tokens == requests == rows:
            bucket = next((b for b in self._buckets if b >= tokens), None)
            if bucket is not None:
                return self._bucket(bucket)
        sizes = tokens, requests, rows
        form = self._forms.pop(sizes, None) or self._bound(sizes)
        self._forms[sizes] = form  # the last one is the one used last
        if len(self._forms) > MAX_FORMS:
            del self._forms[next(iter(self._forms))]
        return form

    def _bucket(self, size: int) -> Form:
        form = self._recorded.get(size)
        if form is None:
            bound = self._bound((size, size, size))
            graph = self._device.record(bound.launch)
            form = self._recorded[size] = Form(bound.staged, bound.launches, graph, bound.numbers)
        return form

    def _bound(self, sizes: tuple[int, int, int]) -> Form:
        staged = self._area.lay_out(step_shapes(sizes, self._num_groups, self._width))
        named = dict(zip("TRQ", sizes, strict=True)) | {
            f"M{group}": self._width for group in range(self._num_groups)
        }
        launches = self._program.bind("forward", named, {**self._inputs, **staged.addresses})
        return Form(staged, launches, None, self._numbers[: sizes[2]])
