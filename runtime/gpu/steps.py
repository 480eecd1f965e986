"""The step's arrays on a device, and what runs over them.

Steps in which every request has one token and one row, as in decode, are padded to a few sizes (buckets), and
each of these is recorded once. Padding writes nothing: its slots are negative and its requests empty.
Tables have as many columns as the step's longest request needs, rounded up to one of a few widths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from runtime.gpu.device import Device, Graph
from runtime.gpu.plan import Sizes
from runtime.gpu.program import Given, Program
from runtime.gpu.staging import Area, Shapes, Staged, array_bytes, staged_bytes
from runtime.limits import Limits
from runtime.step import Step

LEAST_WIDTH = 64  # of tables: 1,024 tokens in blocks of 16, and 256 bytes to copy for each request


def decode_buckets(most: int) -> tuple[int, ...]:
    """Sizes of decode steps up to `most` requests."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, most + 1, 32)]
    return (*(size for size in sizes if size < most), most)


@dataclass(frozen=True, slots=True)
class Tables:
    """count: how many there are. width: columns for a request of the whole context. block: tokens of one."""

    count: int
    width: int
    block: int

    def width_for(self, lens: np.ndarray) -> int:
        """The step's. Each width is recorded for itself, so one is four times the one before."""
        needed, width = -(-int(lens.max(initial=0)) // self.block), LEAST_WIDTH
        while width < needed:
            width *= 4
        return min(width, self.width)


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


def step_given(num_groups: int) -> Given:
    """What the section "forward" is given."""
    caches = (f"kv{group}" for group in range(num_groups))
    widths = (f"M{group}" for group in range(num_groups))
    return Given.of([*step_shapes((1, 1, 1), num_groups, 1), *caches, "logits"], [*"TRQ", *widths])


def step_room(limits: Limits, num_groups: int, width: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the step's arrays, by name, and the most that each size may be."""
    sizes = limits.max_step_tokens, limits.max_requests, limits.max_rows
    widths = {f"M{group}": width for group in range(num_groups)}
    arrays = array_bytes(step_shapes(sizes, num_groups, width))
    return arrays, dict(zip("TRQ", sizes, strict=True)) | widths


@dataclass(frozen=True, slots=True)
class Form:
    """Steps of certain sizes: their arrays, and their launches recorded as one or not."""

    staged: Staged
    sizes: Sizes
    graph: Graph | None = None

    def upload(self, step: Step) -> None:
        """Copy the step to the device. What is beyond its sizes becomes padding."""
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
            columns = min(held.shape[1], table.shape[1])
            held[:requests, :columns] = table[:, :columns]
            held[requests:] = 0
        self.staged.upload()


def _fill(target: np.ndarray, source: np.ndarray, count: int, rest: int) -> None:
    target[:count] = source
    target[count:] = rest


class Steps:
    """Runs steps. inputs: addresses of what they share, the caches and the logits.

    buckets: sizes that decode steps are padded to; default, decode_buckets().
    """

    def __init__(
        self,
        device: Device,
        program: Program,
        limits: Limits,
        tables: Tables,
        inputs: Mapping[str, int],
        buckets: Sequence[int] | None = None,
    ) -> None:
        self._device, self._program, self._inputs = device, program, inputs
        self._tables = tables
        self._area = Area.of(device, step_bytes(limits, tables.count, tables.width), "the step's arrays")
        most = min(limits.max_step_tokens, limits.max_requests)
        given = decode_buckets(most) if buckets is None else buckets
        self._buckets = [size for size in given if size <= most]
        self._recorded: dict[tuple[int, int], Form] = {}  # by bucket and width of tables

    def start(self, step: Step) -> None:
        """Start a step; the one before must be done."""
        sizes = len(step.ids), len(step.lens), len(step.rows)
        bucket, width = self._bucket(sizes), self._tables.width_for(step.lens)
        if bucket is None:
            form = self._form(sizes, width)
            form.upload(step)
            self._run(form)
            return
        if (bucket, width) not in self._recorded:
            form = self._form((bucket, bucket, bucket), width)
            graph = self._device.record(lambda: self._run(form))
            self._recorded[bucket, width] = Form(form.staged, form.sizes, graph)
        form = self._recorded[bucket, width]
        form.upload(step)
        assert form.graph is not None
        form.graph.replay()

    def _bucket(self, sizes: tuple[int, int, int]) -> int | None:
        """The size that a decode step is padded to."""
        tokens = sizes[0]
        if sizes != (tokens, tokens, tokens):
            return None
        return next((size for size in self._buckets if size >= tokens), None)

    def _form(self, sizes: tuple[int, int, int], width: int) -> Form:
        staged = self._area.lay_out(step_shapes(sizes, self._tables.count, width))
        widths = {f"M{group}": width for group in range(self._tables.count)}
        return Form(staged, dict(zip("TRQ", sizes, strict=True)) | widths)

    def _run(self, form: Form) -> None:
        self._program.run("forward", form.sizes, {**self._inputs, **form.staged.addresses})
