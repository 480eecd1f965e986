"""A memory plan as an aligned table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runtime.memory.plan import GroupMemory, MemoryPlan

Row = tuple[str, str, int | None]  # what, of what, bytes (None: unknown)


def in_units(num_bytes: int) -> str:
    """Bytes as people read them: 512 bytes, 1.5 MiB."""
    size, unit = float(num_bytes), "bytes"
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{num_bytes:,} bytes" if unit == "bytes" else f"{size:,.1f} {unit}"


def table(plan: MemoryPlan, lengths: Sequence[int]) -> str:
    """The parts, the total beside what is free, and the most concurrent requests of some lengths."""
    rows = _rows(plan)
    counts = [f"{size:,}" if size is not None else "unknown" for _, _, size in rows]
    first, second = max(len(what) for what, _, _ in rows), max(len(of) for _, of, _ in rows)
    width = max(map(len, counts))
    lines = [f"memory of {plan.place.name} for the target {plan.target}, in bytes"]
    for (what, of, size), count in zip(rows, counts, strict=True):
        units = "" if size is None or abs(size) < 1024 else f"  {in_units(size):>12}"
        lines.append(f"{what:{first}}  {of:{second}}  {count:>{width}}{units}".rstrip())
    lines += ["", *_concurrent(plan, lengths)]
    if plan.refusal is not None:
        lines += ["", f"does not fit: {plan.refusal}"]
    if plan.unknown:
        lines += ["", *(f"unknown: {each}" for each in plan.unknown)]
    return "\n".join(lines)


def _rows(plan: MemoryPlan) -> list[Row]:
    limits, work, place = plan.limits, plan.workspace, plan.place
    few = [name for name in ("tail", "state") if any(getattr(group, name) for group in plan.groups)]
    but = f" but {' and '.join(f'{name}s' for name in few)}" if few else ""
    blocks = f"{plan.swap_blocks:,} blocks of every group{but}"
    swap = [("swap", blocks, plan.swap_bytes)] * (plan.swap_blocks > 0)
    shared = place.host_bytes is None
    free = plan.free_bytes
    return [
        ("weights", "", plan.weight_bytes),
        ("arena", f"steps of {limits.max_step_tokens:,} tokens", work.arena),
        ("logits", f"{limits.max_rows:,} rows", work.logits),
        ("sampler", "", work.sampler),
        ("inputs", f"{limits.max_requests:,} requests", work.inputs),
        *(("KV cache", _group(group), group.num_bytes) for group in plan.groups),
        *_draft(plan),
        *(swap if shared else []),
        ("in all", "", plan.total_bytes),
        ("free", "", free),
        *([("left", "", free - plan.total_bytes)] if free is not None else []),
        *([] if shared else swap),
        *([("free", "the host", place.host_bytes)] if swap and not shared else []),
    ]


def _draft(plan: MemoryPlan) -> list[Row]:
    draft = plan.draft
    if draft is None:
        return []
    cache = [("draft", "KV cache", draft.kv_bytes)] if draft.kv_bytes else []
    return [("draft", "weights", draft.weight_bytes), ("draft", "workspace", draft.workspace.total), *cache]


def _group(group: GroupMemory) -> str:
    lifetime = "full" if group.window is None else f"window {group.window:,}"
    lifetime = "tail" if group.tail else lifetime
    layers = f"{group.layers} layer{'s' * (group.layers > 1)}"
    if group.state:
        return f"{layers}, state: {group.blocks:,} blocks of {group.block_bytes:,} bytes"
    return (
        f"{layers}, {lifetime}, {group.bytes_per_token:,} bytes per token: {group.blocks:,} blocks of "
        f"{group.block}"
    )


def _concurrent(plan: MemoryPlan, lengths: Sequence[int]) -> list[str]:
    most = plan.limits.max_requests
    found = [(f"{length:,}", f"{plan.concurrent(length):,}") for length in lengths]
    widths = [max(len(row[i]) for row in found) for i in (0, 1)]
    return [
        f"requests at once, {most:,} at most",
        *(f"  of {length:>{widths[0]}} tokens  {count:>{widths[1]}}" for length, count in found),
    ]
