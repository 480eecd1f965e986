"""Sampling on a device: a plan's sections beside "forward", over rows of logits that stay there.

A call is one copy to the device, at most two sections, and one copy back, for which the host waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

from runtime.executor import Logits, SampleArgs, Sampled
from runtime.gpu.device import Device
from runtime.gpu.program import Program, Work
from runtime.gpu.staging import Area, Shapes, Staged, staged_bytes
from runtime.sampling import MAX_LOGPROBS

MAX_CALLS = 64  # whose launches are kept bound; those used least recently are forgotten
SECTIONS = ("sample_greedy", "sample_unfiltered", "sample", "top", "logprobs")
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


@dataclass(frozen=True, slots=True)
class Call:
    """Sections over so many rows."""

    given: Staged
    found: Staged
    launches: Sequence[Work]

    def run(self, device: Device) -> None:
        """Upload, run, and wait for what was found."""
        self.given.upload()
        for launch in self.launches:
            launch()
        self.found.download()
        device.synchronize()


class GpuSampler:
    """logits: the address of the first row."""

    def __init__(self, device: Device, program: Program, max_rows: int, vocab_size: int, logits: int) -> None:
        self._device, self._program = device, program
        program.require(SECTIONS)
        self._given = Area.of(device, staged_bytes(given_shapes(max_rows)), "sampling parameters")
        self._found = Area.of(device, _found_bytes(max_rows, vocab_size), "sampled tokens")
        scratch = device.allocate(_scratch_bytes(max_rows, program.plan.sample_scratch), "sampling")
        self._inputs = {"logits": logits, "sample_scratch": scratch}
        self._calls: dict[tuple[int, int, tuple[str, ...]], Call] = {}

    def sample(self, rows: Logits, args: SampleArgs) -> Sampled:
        """Ids are -1 where a row is broken."""
        section = _section(args)
        call = self._call(len(rows), args.num_top, (section, "top") if args.num_top else (section,))
        arrays = call.given.arrays
        arrays["logit_rows"][:] = rows
        if section != "sample_greedy":
            for name in _PARAMETERS:
                arrays[name][:] = getattr(args, name)
        call.run(self._device)
        found = call.found.arrays
        return Sampled(
            found["sampled_ids"], found["sampled_logprobs"], found["top_ids"], found["top_logprobs"]
        )

    def logprobs(self, rows: Logits, ids: np.ndarray) -> np.ndarray:
        call = self._call(len(rows), 0, ("logprobs",))
        call.given.arrays["logit_rows"][:] = rows
        call.given.arrays["given_ids"][:] = ids
        call.run(self._device)
        return call.found.arrays["given_logprobs"].copy()

    def _call(self, rows: int, width: int, sections: tuple[str, ...]) -> Call:
        key = rows, width, sections
        call = self._calls.pop(key, None) or self._bound(rows, width, sections)
        self._calls[key] = call  # the last one is the one used last
        if len(self._calls) > MAX_CALLS:
            del self._calls[next(iter(self._calls))]
        return call

    def _bound(self, rows: int, width: int, sections: tuple[str, ...]) -> Call:
        given, found = self._given.lay_out(given_shapes(rows)), self._found.lay_out(found_shapes(rows, width))
        inputs = {**self._inputs, **given.addresses, **found.addresses}
        sizes = {"Q": rows, "K": width}
        launches = [launch for name in sections for launch in self._program.bind(name, sizes, inputs)]
        return Call(given, found, launches)


def _section(args: SampleArgs) -> str:
    """The least work that finds what is wanted."""
    if not args.logprobs and not args.temperature.any():
        return "sample_greedy"
    filtered = ((args.top_k > 0) | (args.top_p < 1)) & (args.temperature > 0)
    return "sample" if filtered.any() else "sample_unfiltered"
