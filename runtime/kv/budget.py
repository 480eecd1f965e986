"""How many blocks each KV group gets: from a count, from bytes, or from a share of the free memory."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime import machine
from runtime.errors import ResourceError, shown
from runtime.kv.group import Group
from runtime.limits import Limits
from runtime.manifest import MAX_INT32, KVGroup

TAIL_PERCENT = 25  # of the KV cache's bytes, at most for tails
STATE_PERCENT = 50  # of what is left, for states, where other groups can use all the rest
CHECKPOINTS = 2  # blocks of a state, for each request, that prefix hits may find
_SHARE = re.compile(r"\s*(\d{1,3}(?:\.\d{1,6})?)\s*%\s*")


@dataclass(frozen=True)
class Budget:
    """What the KV cache may take: so many blocks of every group, or bytes of all groups together, or a share
    of what all else leaves free. One of them, or none: a share of the place's choice."""

    blocks: int | None = None
    num_bytes: int | None = None
    percent: float | None = None

    @staticmethod
    def of(kv_blocks: int | None = None, kv_memory: int | str | None = None) -> Budget:
        """kv_memory: bytes, or a text such as "2GiB" or "40%". Raises ResourceError."""
        if kv_blocks is not None and kv_memory is not None:
            raise ResourceError(
                "kv_blocks and kv_memory are both given", where="load", todo="Give one of them"
            )
        if kv_blocks is not None:
            if (
                isinstance(kv_blocks, bool)
                or not isinstance(kv_blocks, int)
                or not 0 < kv_blocks <= MAX_INT32
            ):
                what, todo = f"kv_blocks = {shown(kv_blocks)}", f"Use an integer from 1 to {MAX_INT32}"
                raise ResourceError(what, where="load", todo=todo)
            return Budget(blocks=kv_blocks)
        if kv_memory is None:
            return Budget()
        if isinstance(kv_memory, str) and "%" in kv_memory:
            return Budget(percent=_percent(kv_memory))
        return Budget(num_bytes=machine.parse_bytes(kv_memory, "kv_memory", " or '40%'"))

    def within(self, room: int | None, percent: float) -> int | None:
        """Bytes of all groups together, where `room` are free; None where that is not known.

        percent: of the room, where nothing was asked for.
        """
        if self.num_bytes is not None:
            return self.num_bytes
        percent = percent if self.percent is None else self.percent
        return None if room is None else int(max(0, room) * percent / 100)


def plan_blocks(
    groups: Sequence[KVGroup], limits: Limits, max_context: int, blocks: int | None, num_bytes: int | None
) -> list[int]:
    """Blocks per group: `blocks` of each; else as many as `num_bytes` hold, in proportion to what one request
    of the whole context needs there, and never more than max_requests such requests can use. None: that many.
    A tail gets what requests and a step of theirs can use, of a part of the bytes, before the others; and so
    does a state, with a few blocks for prefix hits: of neither does a request need more where it is longer.

    Raises ResourceError where slots would exceed 32 bits.
    """
    needs = [_need(group, limits, max_context) for group in groups]
    if blocks is not None:
        counts = [
            min(blocks, _most(need, limits, g) if g.is_single else blocks)
            for need, g in zip(needs, groups, strict=True)
        ]
    elif num_bytes is None:
        counts = [_most(need, limits, g) for need, g in zip(needs, groups, strict=True)]
    else:
        counts = _within(num_bytes, needs, groups, limits)
    for group, count in zip(groups, counts, strict=True):
        if count * group.block > MAX_INT32:
            todo = f"Use at most {MAX_INT32 // group.block} blocks"
            what = f"{shown(count)} blocks of {group.block} tokens exceed 32-bit slots"
            raise ResourceError(what, where="KV cache", todo=todo)
    return counts


def swap_places(single: Sequence[bool], swap_blocks: int, limits: Limits) -> list[int]:
    """Places on the host for blocks of each group: of one in which most requests have a single block, no more
    than requests run."""
    return [min(swap_blocks, limits.max_requests) if one else swap_blocks for one in single]


def most_swap_blocks(groups: Sequence[KVGroup], num_bytes: int, limits: Limits) -> int:
    """The most blocks of each group, see swap_places, that the bytes hold."""
    single_bytes = sum(group.block_bytes for group in groups if group.is_single)
    other_bytes = sum(group.block_bytes for group in groups if not group.is_single)
    if num_bytes < limits.max_requests * (single_bytes + other_bytes):
        return num_bytes // max(1, single_bytes + other_bytes)
    if not other_bytes:
        return limits.max_requests if single_bytes else 0
    return (num_bytes - limits.max_requests * single_bytes) // other_bytes


def _within(num_bytes: int, needs: list[int], groups: Sequence[KVGroup], limits: Limits) -> list[int]:
    """As many blocks as the bytes hold; none, where they do not hold what a request needs of tails and states
    and a block of every other group, with which a short one can run."""
    most = [_most(need, limits, group) for need, group in zip(needs, groups, strict=True)]
    counts = [0] * len(groups)

    def bytes_of(which: list[int], blocks: Sequence[int]) -> int:
        return sum(blocks[g] * groups[g].block_bytes for g in which)

    def give(which: list[int], num_bytes: int) -> None:
        """Of each group the same share of its most, and what one request needs."""
        all_bytes = bytes_of(which, most)
        for g in which:
            counts[g] = max(needs[g], min(most[g], most[g] * num_bytes // all_bytes))

    every = range(len(groups))
    tails, states = [g for g in every if groups[g].tail], [g for g in every if groups[g].state]
    others = [g for g in every if not groups[g].is_single]
    give(tails, num_bytes * TAIL_PERCENT // 100)
    left = num_bytes - bytes_of(tails, counts)
    give(states, max(left * STATE_PERCENT // 100, left - bytes_of(others, most)))
    left = max(0, left - bytes_of(states, counts))
    for g in others:
        counts[g] = min(needs[g] * left // bytes_of(others, needs), most[g])
    if all(counts) and bytes_of([*every], counts) <= num_bytes:
        return counts
    return _few(num_bytes, needs, groups)


def _few(num_bytes: int, needs: list[int], groups: Sequence[KVGroup]) -> list[int]:
    """What a request needs of tails and states, one block of every other group, and of what is left its share
    of what the request needs there; none, where the bytes do not hold the first two."""
    least = [need if group.is_single else 1 for need, group in zip(needs, groups, strict=True)]
    more = [need - count for need, count in zip(needs, least, strict=True)]
    left = num_bytes - sum(count * group.block_bytes for count, group in zip(least, groups, strict=True))
    if left < 0:
        return [0] * len(groups)
    all_bytes = sum(count * group.block_bytes for count, group in zip(more, groups, strict=True))
    return [n + min(m, m * left // max(1, all_bytes)) for n, m in zip(least, more, strict=True)]


def _need(group: KVGroup, limits: Limits, tokens: int) -> int:
    """Blocks that a request of `tokens` needs."""
    rules = Group(0, group.window, group.tail, group.state)
    return rules.most_blocks(tokens, limits.max_step_tokens, group.block)


def _most(need: int, limits: Limits, group: KVGroup) -> int:
    """Blocks that requests can use; of a tail one each, and those that a step's tokens fill; of a state those
    that hits may find, too."""
    filled = -(-limits.max_step_tokens // group.block) if group.tail else 0
    kept = CHECKPOINTS * limits.max_requests if group.state else 0
    return min(need * limits.max_requests + filled + kept, MAX_INT32 // group.block)


def _percent(text: str) -> float:
    match = _SHARE.fullmatch(text)
    if match is None or not 0 < float(match[1]) <= 100:
        todo = "Use a share of the free memory such as '40%', up to 100%"
        raise ResourceError(f"kv_memory = {shown(text)}", where="load", todo=todo)
    return float(match[1])
