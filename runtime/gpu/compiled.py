"""What an artifact has for a GPU target, read and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from runtime.gpu.bounds import Room
from runtime.gpu.device import KernelSpec
from runtime.gpu.memory import count_workspace, table_width, weight_offsets
from runtime.gpu.plan import Plan
from runtime.gpu.sampler import SECTIONS, sampler_room
from runtime.gpu.steps import step_room
from runtime.limits import Limits
from runtime.manifest import KVGroup, Model
from runtime.memory.plan import MemoryPlan, Place
from runtime.weights import Weights


@dataclass(frozen=True)
class Compiled:
    """target: as --target spells it."""

    target: str
    plan: Plan
    kernels: Sequence[KernelSpec]
    weights: Weights
    model: Model
    groups: Sequence[KVGroup]

    @property
    def table_width(self) -> int:
        """Blocks of a request of the whole context."""
        return table_width(self.model, self.groups)

    @property
    def block(self) -> int:
        """Tokens of a block, the same in all groups."""
        return self.groups[0].block if self.groups else self.model.max_context

    def buffer_bytes(self, limits: Limits) -> list[int]:
        return self.plan.buffer_bytes(limits.max_step_tokens, limits.max_requests, limits.max_rows)

    def memory(self, limits: Limits, num_blocks: Sequence[int], place: Place) -> MemoryPlan:
        """What is taken of a device for steps up to the limits, over so many blocks of each group."""
        _, weight_bytes = weight_offsets([tensor.size for tensor in self.weights.tensors])
        return MemoryPlan.of(
            self.groups,
            num_blocks,
            target=self.target,
            place=place,
            limits=limits,
            max_context=self.model.max_context,
            weight_bytes=weight_bytes,
            workspace=count_workspace(self.plan, limits, self.model, self.groups),
            swap_blocks=0,
        )

    def rooms(self, limits: Limits, num_blocks: Sequence[int]) -> Mapping[str, Room]:
        """What each section of the plan is given, for steps up to the limits."""
        buffers, weights = self.buffer_bytes(limits), [tensor.size for tensor in self.weights.tensors]
        blocks = zip(num_blocks, self.groups, strict=True)
        caches = {f"kv{i}": count * group.block_bytes for i, (count, group) in enumerate(blocks)}
        shared = {**caches, "logits": limits.max_rows * self.model.vocab_size * 4}
        arrays, sizes = step_room(limits, len(self.groups), self.table_width)
        forward = Room(buffers, weights, {**arrays, **shared}, sizes)
        arrays, sizes = sampler_room(limits.max_rows, self.model.vocab_size, self.plan.sample_scratch)
        sampler = Room(buffers, weights, {**arrays, **shared}, sizes)
        return {"forward": forward, **dict.fromkeys(SECTIONS, sampler)}
