"""The memory that an engine will hold, by what it is for: counted, and refused, before any of it is taken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime import machine
from runtime.errors import RequestError, ResourceError, shown
from runtime.kv.budget import swap_places
from runtime.kv.group import Group
from runtime.limits import Limits
from runtime.manifest import KVGroup
from runtime.memory.table import in_units, table

HOST_PERCENT = 50.0  # of free memory for the KV cache, where nothing is asked for
DEVICE_PERCENT = 90.0


@dataclass(frozen=True)
class Workspace:
    """Bytes for steps up to the limits. sampler: what it is given, what it finds, and room to find it.
    inputs: the step's arrays."""

    arena: int
    logits: int
    sampler: int
    inputs: int

    @property
    def total(self) -> int:
        return self.arena + self.logits + self.sampler + self.inputs


@dataclass(frozen=True)
class DraftMemory:
    """Bytes of a model that drafts. kv_bytes: of its own blocks, so many of each group; 0 where it works
    on the target's."""

    weight_bytes: int
    workspace: Workspace
    kv_bytes: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return self.weight_bytes + self.workspace.total + self.kv_bytes


@dataclass(frozen=True)
class Place:
    """Where memory is taken. free_bytes: None where that cannot be known here. host_bytes: free where swapped
    blocks go, if that is another memory. percent: of what is free for the KV cache, where nothing is asked
    for."""

    name: str
    free_bytes: int | None
    host_bytes: int | None = None
    percent: float = HOST_PERCENT

    @staticmethod
    def host() -> Place:
        return Place("the host", machine.free_memory())


@dataclass(frozen=True)
class GroupMemory:
    """A KV group's blocks. window: tokens that a query sees, None for all. tail: it holds a request's last
    block alone, until that is full. state: it holds the block of a request's last token, from which a
    recurrence goes on, and takes no more for more tokens. block: tokens of one. bytes_per_token, block_bytes:
    of all its layers and streams, with scales, a block's rounded up to 64."""

    layers: int
    window: int | None
    tail: bool
    state: bool
    block: int
    bytes_per_token: float
    block_bytes: int
    blocks: int

    @property
    def num_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def is_single(self) -> bool:
        """Whether a request keeps one block of it, however many tokens it has."""
        return self.tail or self.state

    def most_blocks(self, tokens: int, step_tokens: int) -> int:
        """The most that a request of `tokens` holds at once."""
        group = Group(self.blocks, self.window, self.tail, self.state)
        return group.most_blocks(tokens, step_tokens, self.block)


@dataclass(frozen=True)
class MemoryPlan:
    """What an engine of a target holds, in bytes. All of it counts, though the system gives some only when it
    is touched.

    weight_bytes: None in an artifact of shapes alone. swap_blocks: places on the host, of every group; of
    tails and states there may be fewer.
    kv_budget: bytes that the groups were made to fit, None where blocks were given or nothing was known.
    draft: of the model that drafts, None where there is none.
    unknown: what could not be found out, and what that means.
    """

    target: str
    place: Place
    limits: Limits
    max_context: int
    weight_bytes: int | None
    workspace: Workspace
    groups: tuple[GroupMemory, ...]
    swap_blocks: int
    kv_budget: int | None = None
    unknown: tuple[str, ...] = ()
    draft: DraftMemory | None = None

    @staticmethod
    def of(groups: Sequence[KVGroup], num_blocks: Sequence[int], **rest: Any) -> MemoryPlan:
        """With so many blocks of each group."""
        held = [
            GroupMemory(g.layers, g.window, g.tail, g.state, g.block, g.bytes_per_token, g.block_bytes, count)
            for g, count in zip(groups, num_blocks, strict=True)
        ]
        return MemoryPlan(groups=tuple(held), **rest)

    @property
    def num_blocks(self) -> list[int]:
        """Per group."""
        return [group.blocks for group in self.groups]

    @property
    def kv_bytes(self) -> int:
        return sum(group.num_bytes for group in self.groups)

    @property
    def swap_bytes(self) -> int:
        return sum(n * group.block_bytes for n, group in zip(self.swap_places, self.groups, strict=True))

    @property
    def swap_places(self) -> list[int]:
        """Per group."""
        return swap_places([group.is_single for group in self.groups], self.swap_blocks, self.limits)

    @property
    def total_bytes(self) -> int:
        """Of the place: without the swapped blocks where those go elsewhere, and unknown weights."""
        swap_bytes = self.swap_bytes if self.place.host_bytes is None else 0
        held = (self.weight_bytes or 0) + self.workspace.total + self.kv_bytes
        return held + self.draft_bytes + swap_bytes

    @property
    def draft_bytes(self) -> int:
        return 0 if self.draft is None else self.draft.total

    @property
    def free_bytes(self) -> int | None:
        """Of the place, when the plan was made."""
        return self.place.free_bytes

    def concurrent(self, length: int) -> int:
        """The most requests that fit at once, each of `length` tokens in the cache and none sharing any.

        A group with a window counts what a request holds of it at most, in steps of max_step_tokens. Raises
        RequestError for a length that the context does not hold.
        """
        if isinstance(length, bool) or not isinstance(length, int) or not 1 <= length <= self.max_context:
            todo = f"Use 1 to {self.max_context}, the context"
            raise RequestError(f"length = {shown(length)}", where="concurrent", todo=todo)
        step_tokens = self.limits.max_step_tokens
        fit = [group.blocks // group.most_blocks(length, step_tokens) for group in self.groups]
        return min([self.limits.max_requests, *fit])

    def check(self) -> None:
        """Raises ResourceError, with the numbers, where more is planned than is free."""
        over = self.total_bytes - (self.total_bytes if self.free_bytes is None else self.free_bytes)
        if over > 0:
            what = f"{self.place.name} has {in_units(self.free_bytes or 0)} of memory free; {self._sum()}"
            raise ResourceError(what, where=self.target, todo=self._lower(over))
        host = self.place.host_bytes
        if host is not None and self.swap_bytes > host:
            what = f"the host has {in_units(host)} of memory free; swap takes {in_units(self.swap_bytes)}"
            todo = f"Lower swap_memory to {host} bytes at most"
            raise ResourceError(what, where=self.target, todo=todo)
        if not all(self.num_blocks):
            least, request = self._least_kv_bytes(), self._kv_bytes_of(self.max_context)
            two = ", two of a state," if any(group.state for group in self.groups) else ""
            what = (
                f"{self.kv_budget} bytes for the KV cache do not hold one block of every group{two} ({least} "
                f"bytes; one request of the whole context, {self.max_context} tokens, takes {request})"
            )
            todo = "Give more kv_memory ('2GiB', or '40%' of what is free), or free memory"
            raise ResourceError(what, where=self.target, todo=todo)

    def __str__(self) -> str:
        return self.text()

    def text(self, lengths: Sequence[int] = ()) -> str:
        """A table, with the most concurrent requests at some lengths; by default a few up to the context."""
        return table(self, lengths or default_lengths(self.max_context))

    def as_json(self, lengths: Sequence[int] = ()) -> dict[str, Any]:
        """Plain values of all that the table shows."""
        return {
            "target": self.target,
            "place": self.place.name,
            "weight_bytes": self.weight_bytes,
            **{f"{name}_bytes": size for name, size in vars(self.workspace).items()},
            "workspace_bytes": self.workspace.total,
            "groups": [{**vars(group), "bytes": group.num_bytes} for group in self.groups],
            "kv_bytes_per_token": sum(group.bytes_per_token for group in self.groups if not group.tail),
            "kv_bytes": self.kv_bytes,
            "draft_bytes": self.draft_bytes,
            "swap_blocks": self.swap_blocks,
            "swap_bytes": self.swap_bytes,
            "total_bytes": self.total_bytes,
            "free_bytes": self.free_bytes,
            "host_free_bytes": self.place.host_bytes,
            "max_step_tokens": self.limits.max_step_tokens,
            "max_requests": self.limits.max_requests,
            "max_context": self.max_context,
            "concurrent": {str(n): self.concurrent(n) for n in lengths or default_lengths(self.max_context)},
            "refusal": self.refusal,
            "unknown": list(self.unknown),
        }

    @property
    def refusal(self) -> str | None:
        """What check() would raise."""
        try:
            self.check()
        except ResourceError as error:
            return str(error)
        return None

    def _kv_bytes_of(self, tokens: int) -> int:
        """Of one request."""
        step_tokens = self.limits.max_step_tokens
        return sum(g.most_blocks(tokens, step_tokens) * g.block_bytes for g in self.groups)

    def _least_kv_bytes(self) -> int:
        """Where `plan_blocks` gives every group a block, and all that a request needs of tails and states."""
        step_tokens = self.limits.max_step_tokens
        needs = [g.most_blocks(self.max_context, step_tokens) if g.is_single else 1 for g in self.groups]
        return sum(need * group.block_bytes for need, group in zip(needs, self.groups, strict=True))

    def _sum(self) -> str:
        """The table in a line."""
        parts: Mapping[str, int | None] = {
            "weights": self.weight_bytes,
            **vars(self.workspace),
            "KV cache": self.kv_bytes,
            "draft": self.draft_bytes or None,
            "swap": self.swap_bytes if self.place.host_bytes is None and self.swap_bytes else None,
        }
        found = ", ".join(f"{name} {in_units(size)}" for name, size in parts.items() if size is not None)
        return f"this takes {in_units(self.total_bytes)}: {found}"

    def _lower(self, over: int) -> str:
        """What to lower, where `over` bytes are too many."""
        left, block_bytes = self.kv_bytes - over, sum(group.block_bytes for group in self.groups)
        if block_bytes and left >= block_bytes:
            return f"Lower kv_memory to {left} bytes at most, or kv_blocks to {left // block_bytes}"
        swap = "swap_memory, " * (self.place.host_bytes is None and self.swap_blocks > 0)
        return f"Lower {swap}kv_memory, max_step_tokens or max_requests, or free memory"


def default_lengths(max_context: int) -> list[int]:
    """A few lengths to show, the last one the whole context."""
    return [*(n for n in (256, 1024, 4096, 16384, 65536) if n < max_context), max_context]
