"""How many blocks each KV group gets: from a count, from bytes, or from a share of the free memory."""

from __future__ import annotations

from collections.abc import Sequence

from runtime import machine
from runtime.errors import ResourceError
from runtime.kv.group import Group
from runtime.manifest import MAX_INT32, KVGroup
from runtime.scheduler import Limits

FREE_SHARE = 0.5  # of free memory, where nothing is asked for; the pool is only touched as it is used


def plan_blocks(
    groups: Sequence[KVGroup],
    limits: Limits,
    max_context: int,
    kv_blocks: int | None = None,
    kv_memory: int | str | None = None,
    *,
    held: int = 0,
    free: int | None = None,
    share: float = FREE_SHARE,
) -> list[int]:
    """Blocks per group. kv_blocks: of every group. kv_memory: bytes of all groups together, or a text like
    "2GiB"; default, a share (half) of the free memory (the host's), less what others will hold of it.

    Never more than max_requests requests of the whole context can use, unless kv_blocks says so.
    Raises ResourceError if a group would get no block.
    """
    if kv_blocks is not None and kv_memory is not None:
        raise ResourceError("kv_blocks and kv_memory are both given", todo="Give one of them")
    if kv_blocks is not None:
        if isinstance(kv_blocks, bool) or not isinstance(kv_blocks, int) or kv_blocks < 1:
            raise ResourceError(f"kv_blocks = {kv_blocks!r}", todo="Use an integer of at least 1")
        counts = [kv_blocks] * len(groups)
    else:
        room = (machine.free_memory() if free is None else free) - held
        budget = int(max(0, room) * share) if kv_memory is None else machine.parse_bytes(kv_memory)
        counts = _share(groups, limits, max_context, budget)
    for group, count in zip(groups, counts, strict=True):
        if count * group.block > MAX_INT32:
            todo = f"Use at most {MAX_INT32 // group.block} blocks"
            raise ResourceError(f"{count} blocks of {group.block} tokens exceed 32-bit slots", todo=todo)
    return counts


def _share(groups: Sequence[KVGroup], limits: Limits, max_context: int, budget: int) -> list[int]:
    """Every group gets memory in proportion to what one request of the whole context needs there."""
    needs = [Group(0, g.window).most_blocks(max_context, limits.max_step_tokens, g.block) for g in groups]
    request_bytes = sum(need * g.block_bytes for need, g in zip(needs, groups, strict=True))
    counts = [
        min(need * limits.max_requests, need * budget // request_bytes, MAX_INT32 // g.block)
        for need, g in zip(needs, groups, strict=True)
    ]
    if any(count < 1 for count in counts):
        block_bytes = sum(g.block_bytes for g in groups)
        raise ResourceError(
            f"{budget} bytes for the KV cache do not hold one block of every group ({block_bytes} bytes; one "
            f"request of the whole context, {max_context} tokens, takes {request_bytes})",
            todo="Give more kv_memory, or free memory",
        )
    return counts
