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

    Raises ResourceError where slots would exceed 32 bits.
    """
    needs = [Group(0, g.window).most_blocks(max_context, limits.max_step_tokens, g.block) for g in groups]
    request_bytes = sum(need * g.block_bytes for need, g in zip(needs, groups, strict=True))
    if blocks is not None:
        counts = [blocks] * len(groups)
    elif num_bytes is None:
        counts = [_most(need, limits, g) for need, g in zip(needs, groups, strict=True)]
    else:
        counts = [
            min(need * num_bytes // request_bytes, _most(need, limits, g))
            for need, g in zip(needs, groups, strict=True)
        ]
    for group, count in zip(groups, counts, strict=True):
        if count * group.block > MAX_INT32:
            todo = f"Use at most {MAX_INT32 // group.block} blocks"
            what = f"{shown(count)} blocks of {group.block} tokens exceed 32-bit slots"
            raise ResourceError(what, where="KV cache", todo=todo)
    return counts


def _most(need: int, limits: Limits, group: KVGroup) -> int:
    return min(need * limits.max_requests, MAX_INT32 // group.block)


def _percent(text: str) -> float:
    match = _SHARE.fullmatch(text)
    if match is None or not 0 < float(match[1]) <= 100:
        todo = "Use a share of the free memory such as '40%', up to 100%"
        raise ResourceError(f"kv_memory = {shown(text)}", where="load", todo=todo)
    return float(match[1])
