"""Sampling: sections of launches beside "forward" that choose tokens from rows of logits (docs/artifact.md).

A row is cut into splits, one program each, whose findings a last program combines. What top-k and top-p
keep of a row is all logits above a threshold and, of those equal to it, the ones of lowest id. The threshold
is searched for by passes over the row: each cuts the range of keys (i32 in the order of the logits) into FAN
equal parts, and counts and weighs the logits at and above each cut. So `passes` of them find it among 2^32
keys, whatever the logits are. The launch of a pass sums up the splits of the pass before and goes on in the
part where the threshold lies; a split without logits there writes zeros and reads none. A row that has top-k
and top-p is searched twice: first by count, then by mass among what the first has kept. Masses are integers,
so that the passes agree with each other and no bit depends on the order of sums.

A filtered row reads its V logits at most 2 + 2 passes times, 4 V bytes each: 18 times, 9 MB at a vocabulary
of 128256, mostly from L2. A usual row reads fewer: once the range holds few logits, most splits read none.

Scratch of a row, PAD being SPLITS rounded up to a power of two: state i64 [2, 8] (the range's ends, count and
mass above it, what is needed, and 0: no search, 1: by count, 2: by mass), masses i64 [2, PAD, FAN] and counts
i32 [2, PAD, FAN] at the cuts, aboves i32 [2, PAD] (a split's logits above the range), maxima, sums and bests
f32, firsts and best_ids i32 [PAD]. Of two, a pass reads one and writes the other.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from codegen.triton.context import Context
from codegen.triton.devices import Device
from codegen.triton.launch import Arg, Constant, Launch, always
from codegen.triton.render import render
from codegen.triton.schedule import power_of_two
from ir.graph import tensor_of

LEAST_KEY = "-0x7F800001"  # of -infinity
MAX_TOP = 1024  # what "top" sorts per row
PARAMETERS = {
    "temperature": "*fp32", "top_p": "*fp32", "min_p": "*fp32", "top_k": "*i32", "seed": "*u64",
    "sample_index": "*i32", "position": "*i32",
}  # fmt: skip


@dataclass(frozen=True)
class SampleTile:
    """block: logits of a split. bits: of a key that a pass decides. group: cuts compared at a time."""

    block: int
    bits: int
    group: int
    num_warps: int


def sample_tile(device: Device, vocab_size: int) -> SampleTile:
    if device.interpreted:
        return SampleTile(power_of_two(min(vocab_size, 65536)), 8, 64, 1)
    return SampleTile(4096, 4, 4, 8)


@dataclass(frozen=True)
class Area:
    """An array of a row's scratch. halves: bytes from the first of two to the second."""

    type: str
    offset: int
    halves: int = 0


@dataclass(frozen=True)
class Sampler:
    """Prints launches over rows of `vocab_size` logits."""

    ctx: Context
    vocab_size: int
    tile: SampleTile

    @staticmethod
    def of(ctx: Context) -> Sampler:
        vocab_size = int(tensor_of(ctx.graph.outputs[0]).shape[-1])
        return Sampler(ctx, vocab_size, sample_tile(ctx.device, vocab_size))

    @property
    def splits(self) -> int:
        return -(-self.vocab_size // self.tile.block)

    @property
    def pad(self) -> int:
        return power_of_two(self.splits)

    @property
    def passes(self) -> int:
        return -(-32 // self.tile.bits)

    @property
    def areas(self) -> dict[str, Area]:
        fan, pad = 1 << self.tile.bits, self.pad
        cuts = pad * fan
        sizes = {
            "state": ("*i64", 64, 2), "masses": ("*i64", 8 * cuts, 2), "counts": ("*i32", 4 * cuts, 2),
            "aboves": ("*i32", 4 * pad, 2), "maxima": ("*fp32", 4 * pad, 1), "sums": ("*fp32", 4 * pad, 1),
            "firsts": ("*i32", 4 * pad, 1), "bests": ("*fp32", 4 * pad, 1), "best_ids": ("*i32", 4 * pad, 1),
        }  # fmt: skip
        found, offset = dict[str, Area](), 0
        for name, (type_, size, count) in sizes.items():
            found[name] = Area(type_, offset, size if count == 2 else 0)
            offset += -(-size * count // 16) * 16
        return found | {"end": Area("", offset)}

    @property
    def row_bytes(self) -> int:
        return self.areas["end"].offset

    @property
    def constants(self) -> dict[str, Constant]:
        return {
            "V": self.vocab_size, "BLOCK": self.tile.block, "SPLITS": self.splits, "PAD": self.pad,
            "ROW": self.row_bytes, "FAN": 1 << self.tile.bits, "GROUP": self.tile.group,
            "UNIT": 2.0 ** (62 - (self.vocab_size - 1).bit_length()), "MOST": MAX_TOP,
        }  # fmt: skip

    def scratch(self, *names: str, half: int = 0, suffix: str = "") -> dict[str, Arg]:
        """Areas of the first row's scratch. half: which of two."""
        areas = self.areas
        return {
            name + suffix: self.ctx.given(
                "sample_scratch", areas[name].type, areas[name].offset + half * areas[name].halves
            )
            for name in names
        }

    def logits(self) -> dict[str, Arg]:
        return {"logits": self.ctx.given("logits", "*fp32"), "logit_rows": self.ctx.given("logit_rows")}

    def parameters(self, *names: str) -> dict[str, Arg]:
        return {name: self.ctx.given(name, PARAMETERS[name]) for name in names}

    def launch(
        self, name: str, template: str, args: Mapping[str, Arg], num_warps: int = 0, **hooks: object
    ) -> Launch:
        """A launch of one program per row and split, or per row where its warps are given."""
        body = render(template, least_key=LEAST_KEY, **hooks)
        constants = {k: v for k, v in self.constants.items() if re.search(rf"\b{k}\b", body)}
        grid = ("Q",) if num_warps else ("Q", self.splits)
        warps = num_warps or self.tile.num_warps
        return self.ctx.launch(name, body, args, grid, constants, num_warps=warps, num_stages=1)

    # --- kernels

    def stats(self) -> Launch:
        return self.launch(
            "sample_stats", "sample_stats", self.logits() | self.scratch("maxima", "firsts", "sums")
        )

    def searches(self, *, by_width: bool = False, again: bool = False) -> list[Launch]:
        """The passes that find thresholds: of the `width` likeliest, or of what the rows' parameters keep.

        again: whether a row may have top-k and top-p.
        """
        rest = ["next"] * (self.passes - 1)
        stages = ["begin", *rest, "again", *rest] if again else ["begin", *rest]
        return [self.search(n, stage, by_width) for n, stage in enumerate(stages)]

    def found(self, *names: str, searches: int = 1) -> dict[str, Arg]:
        """What the last pass of so many searches has written."""
        return self.scratch(*names, half=(searches * self.passes - 1) % 2)

    def search(self, number: int, stage: str, by_width: bool) -> Launch:
        double = ("state", "masses", "counts", "aboves")
        args = self.logits() | self.scratch("maxima")
        if stage != "begin":
            args |= self.scratch(*double, half=1 - number % 2)
        args |= self.scratch(*double, half=number % 2, suffix="_out")
        if not by_width:
            args |= self.parameters("temperature", "top_p", *(["top_k"] if stage == "begin" else []))
        elif stage == "begin":
            args["width"] = self.ctx.size("K")
        name = f"sample_{stage}_top" if by_width else f"sample_{stage}"
        return self.launch(name, "sample_search", args, stage=stage, by_width=by_width)

    def noise(self, searches: int) -> Launch:
        """searches: how many have gone before."""
        args = self.logits() | self.scratch("maxima", "bests", "best_ids")
        args |= self.parameters("temperature", "min_p", "seed", "sample_index", "position")
        if searches:
            args |= self.found("state", "masses", "counts", searches=searches) | self.parameters("top_p")
        name = "sample_noise_kept" if searches else "sample_noise"
        return self.launch(name, "sample_noise", args, filtered=searches > 0)

    def finish(self, *, noisy: bool = False, given: bool = False) -> Launch:
        args = self.scratch("maxima")
        out = self.ctx.given("given_logprobs" if given else "sampled_logprobs", "*fp32")
        if noisy or given:
            args |= self.logits() | self.scratch("sums") | {"logprobs": out}
        if given:
            args["given_ids"] = self.ctx.given("given_ids")
        else:
            args |= self.scratch("firsts") | {"sampled_ids": self.ctx.given("sampled_ids")}
        if noisy:
            args |= self.scratch("bests", "best_ids") | self.parameters("temperature")
        name = "sample_given" if given else "sample_finish" if noisy else "sample_greedy"
        return self.launch(name, "sample_finish", args, 1, noisy=noisy, given=given)

    def likeliest(self) -> list[Launch]:
        """Writes the `width` likeliest that a search has found, and sorts them."""
        out = {"top_ids": self.ctx.given("top_ids"), "top_logprobs": self.ctx.given("top_logprobs", "*fp32")}
        out["width"] = self.ctx.size("K")
        found = self.found("state", "masses", "counts", "aboves")
        return [
            self.launch("sample_gather", "sample_gather", self.logits() | found | out),
            self.launch("sample_rank", "sample_rank", self.scratch("maxima", "sums") | out, 8),
        ]


def print_sections(ctx: Context) -> dict[str, Any]:
    """What sampling adds to the plan's sections."""
    s = Sampler.of(ctx)
    sections = {
        "sample_greedy": [s.stats(), s.finish()],
        "sample_unfiltered": [s.stats(), s.noise(0), s.finish(noisy=True)],
        "sample_one_filter": [s.stats(), *s.searches(), s.noise(1), s.finish(noisy=True)],
        "sample": [s.stats(), *s.searches(again=True), s.noise(2), s.finish(noisy=True)],
        "top": [s.stats(), *s.searches(by_width=True), *s.likeliest()],
        "logprobs": [s.stats(), s.finish(given=True)],
    }  # fmt: skip
    return {name: [_entry(launch) for launch in launches] for name, launches in sections.items()}


def scratch_form(ctx: Context) -> dict[str, int]:
    """plan.json's "sample_scratch": bytes per sampled row, and fixed ones."""
    return {"Q": Sampler.of(ctx).row_bytes, "": 0}


def _entry(launch: Launch) -> dict[str, Any]:
    op = launch.kernel.split(".")[0]
    return {"op": op, "loc": "", "cases": [case.json for case in always(launch)]}
