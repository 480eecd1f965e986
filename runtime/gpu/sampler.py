"""Sampling on a device: a plan's sections beside "forward", over rows of logits that stay there.

A call is one copy to the device, at most two sections, and one copy back, for which the host waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache

import numpy as np

from runtime.executor import Logits, SampleArgs, Sampled
from runtime.gpu.device import Device
from runtime.gpu.program import Given, Program
from runtime.gpu.staging import Area, Shapes, Staged, array_bytes, staged_bytes
from runtime.sampling import MAX_LOGPROBS

MAX_LAYOUTS = 64
SECTIONS = ("sample_greedy", "sample_unfiltered", "sample_one_filter", "sample", "top", "logprobs")
_PARAMETERS = {f.name for f in fields(SampleArgs)} - {"num_top", "logprobs"}


def given_shapes(rows: int) -> Shapes:
    """What a call reads."""
    shapes: dict[str, tuple[tuple[int, ...], type[np.generic]]] = {"seed": ((rows,), np.uint64)}
    shapes |= {name: ((rows,), np.float32) for name in ("temperature", "top_p", "min_p")}
    for name in ("top_k", "sample_index", "position", "logit_rows", "given_ids"):
        shapes[name] = (rows,), np.int32
    return shapes


def found_shapes(rows: int, width: int) -> Shapes:
    """What a call writes. width: of the likeliest tokens."""
    return {
        "sampled_ids": ((rows,), np.int32),
        "sampled_logprobs": ((rows,), np.float32),
        "given_logprobs": ((rows,), np.float32),
        "top_ids": ((rows, width), np.int32),
        "top_logprobs": ((rows, width), np.float32),
    }


def sampler_bytes(max_rows: int, vocab_size: int, scratch: tuple[int, int]) -> int:
    """Device memory. scratch: the plan's, per row and fixed."""
    given = staged_bytes(given_shapes(max_rows))
    return given + _found_bytes(max_rows, vocab_size) + _scratch_bytes(max_rows, scratch)


def _found_bytes(max_rows: int, vocab_size: int) -> int:
    return staged_bytes(found_shapes(max_rows, min(MAX_LOGPROBS, vocab_size)))


def _scratch_bytes(max_rows: int, scratch: tuple[int, int]) -> int:
    per_row, fixed = scratch
    return max_rows * per_row + fixed


def sampler_given() -> dict[str, Given]:
    """What the sampler's sections are given."""
    arrays = [*given_shapes(1), *found_shapes(1, 1), "logits", "sample_scratch"]
    return {name: Given.of(arrays, "QK") for name in SECTIONS}


def sampler_room(
    max_rows: int, vocab_size: int, scratch: tuple[int, int]
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of the sampler's arrays, by name, and the most that each size may be."""
    width = min(MAX_LOGPROBS, vocab_size)
    arrays = array_bytes({**given_shapes(max_rows), **found_shapes(max_rows, width)})
    return arrays | {"sample_scratch": _scratch_bytes(max_rows, scratch)}, {"Q": max_rows, "K": width}


class GpuSampler:
    """logits: the address of the first row."""

    def __init__(self, device: Device, program: Program, max_rows: int, vocab_size: int, logits: int) -> None:
        self._device, self._program = device, program
        self._given = Area.of(device, staged_bytes(given_shapes(max_rows)), "sampling parameters")
        self._found = Area.of(device, _found_bytes(max_rows, vocab_size), "sampled tokens")
        scratch = device.allocate(_scratch_bytes(max_rows, program.plan.sample_scratch), "sampling")
        self._inputs = {"logits": logits, "sample_scratch": scratch}
        self._laid_out = lru_cache(MAX_LAYOUTS)(self._lay_out)

    def sample(self, rows: Logits, args: SampleArgs) -> Sampled:
        """Ids are -1 where a row is broken."""
        section, width = _section(args), args.num_top
        given = {"logit_rows": rows}
        if section != "sample_greedy":
            given |= {name: getattr(args, name) for name in _PARAMETERS}
        found = self._run([section, "top"] if width else [section], len(rows), width, given)
        names = ("sampled_ids", "sampled_logprobs", "top_ids", "top_logprobs")
        return Sampled(*(found[name] for name in names))

    def logprobs(self, rows: Logits, ids: np.ndarray) -> np.ndarray:
        found = self._run(["logprobs"], len(rows), 0, {"logit_rows": rows, "given_ids": ids})
        return found["given_logprobs"].copy()

    def _run(
        self, sections: Sequence[str], rows: int, width: int, given: Mapping[str, np.ndarray]
    ) -> Mapping[str, np.ndarray]:
        """Upload, run, and wait for what was found."""
        staged, found, arrays = self._laid_out(rows, width)
        for name, array in given.items():
            staged.arrays[name][:] = array
        staged.upload()
        for section in sections:
            self._program.run(section, {"Q": rows, "K": width}, arrays)
        found.download()
        self._device.synchronize()
        return found.arrays

    def _lay_out(self, rows: int, width: int) -> tuple[Staged, Staged, Mapping[str, int]]:
        """What a call reads and what it writes, and the addresses of all."""
        given = self._given.lay_out(given_shapes(rows))
        found = self._found.lay_out(found_shapes(rows, width))
        return given, found, {**self._inputs, **given.addresses, **found.addresses}


def _section(args: SampleArgs) -> str:
    """The least work that finds what is wanted."""
    if not args.logprobs and not args.temperature.any():
        return "sample_greedy"
    filters = (args.top_k > 0).astype(np.int8) + (args.top_p < 1)
    most = int(filters[args.temperature > 0].max(initial=0))
    return ("sample_unfiltered", "sample_one_filter", "sample")[most]
