"""What an engine has done since it was loaded, and what it holds now."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from runtime.core import Core
from runtime.speculation.speculation import Speculation


@dataclass(frozen=True, slots=True)
class Stats:
    """Counts since loading, and what is held now. blocks: per KV group. print() gives a few lines of it."""

    target: str  # what runs the steps, as --target spells it
    steps: int
    computed_tokens: int
    output_tokens: int
    finished_samples: int
    failed_requests: int
    step_s: float  # spent in steps, and of that
    forward_s: float  # in the compiled forward; the rest is scheduling, sampling and text
    forks: int  # that started from another's blocks
    preemptions: int
    prefix_hits: int
    prefix_hit_tokens: int
    copied_blocks: int  # written by one of several that shared them
    swapped_blocks: int  # kept on the host when their request was preempted
    restored_blocks: int  # copied back from there
    evicted_blocks: int
    running: int  # samples and beams, now
    waiting: int
    blocks_total: list[int]
    blocks_used: list[int]
    blocks_free: list[int]
    blocks_pinned: list[int]  # promised to pinned prefixes
    blocks_cached: list[int]  # of the free ones, those that a prefix hit can revive
    drafter: str | None = None  # as it was chosen; None: nothing is drafted
    drafted_tokens: int = 0  # drafts that were verified
    accepted_tokens: int = 0  # of these, those that were right
    draft_positions: tuple[tuple[int, int], ...] = ()  # (drafted, accepted) at each place of a draft
    verify_steps: int = 0  # that had drafts
    draft_s: float = 0.0  # in the drafter, of step_s
    draft_failures: int = 0  # of the drafter, each of which cost its drafts
    draft_stopped: str | None = None  # why nothing is drafted any more
    speedup: float | None = None  # all steps' time without drafts over theirs, as it is estimated

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.steps} steps on {self.target} in {self.step_s:.2f} s, {self.forward_s:.2f} of it in "
                f"forward: {self.computed_tokens} tokens computed, {self.output_tokens} given",
                f"{self.running} running, {self.waiting} waiting; {self.finished_samples} samples finished, "
                f"{self.failed_requests} requests failed",
                f"{self.prefix_hits} prefix hits of {self.prefix_hit_tokens} tokens, {self.forks} forks, "
                f"{self.copied_blocks} blocks copied on write",
                f"{self.preemptions} preemptions; {self.swapped_blocks} blocks swapped out, "
                f"{self.restored_blocks} in; {self.evicted_blocks} evicted",
                *map(self._group, range(len(self.blocks_total))),
                *([] if self.drafter is None else self._drafts()),
            ]
        )

    def _drafts(self) -> list[str]:
        share = "" if not self.drafted_tokens else f" ({self.accepted_tokens / self.drafted_tokens:.0%})"
        speedup = "" if self.speedup is None else f", an estimated {self.speedup:.2f} times as fast"
        stopped = "" if self.draft_stopped is None else f"; it was stopped: {self.draft_stopped}"
        return [
            f"drafts by {self.drafter}: {self.accepted_tokens} of {self.drafted_tokens} accepted{share} in "
            f"{self.verify_steps} steps, {self.draft_s:.2f} s in the drafter{speedup}; "
            f"{self.draft_failures} failures{stopped}"
        ]

    def _group(self, i: int) -> str:
        return (
            f"KV group {i}: {self.blocks_total[i]} blocks, {self.blocks_used[i]} used, {self.blocks_free[i]} "
            f"free ({self.blocks_cached[i]} of them cached), {self.blocks_pinned[i]} pinned"
        )


def stats(core: Core) -> Stats:
    """A snapshot, taken while the engine runs."""
    scheduler, log = core.scheduler, core.log
    pools = scheduler.cache.pools
    free = [pool.num_free for pool in pools]
    total = [pool.num_blocks for pool in pools]
    return Stats(
        target=core.executor.target,
        **asdict(core.counters),
        forks=log.events["fork"],
        preemptions=log.events["preempt"],
        prefix_hits=log.events["prefix_hit"],
        prefix_hit_tokens=log.amounts["prefix_hit"],
        copied_blocks=log.amounts["copy_on_write"],
        swapped_blocks=log.amounts["swap_out"],
        restored_blocks=log.amounts["swap_in"],
        evicted_blocks=log.amounts["evict"],
        running=len(scheduler.running),
        waiting=scheduler.num_waiting,
        blocks_total=total,
        blocks_used=[t - f for t, f in zip(total, free, strict=True)],
        blocks_free=free,
        blocks_pinned=[scheduler.cache.pins.blocks(group) for group in scheduler.cache.groups],
        blocks_cached=[pool.num_cached for pool in pools],
        **({} if core.speculation is None else _draft_counts(core.speculation)),
    )


def _draft_counts(speculation: Speculation) -> dict[str, Any]:
    total = speculation.total
    return dict(
        drafter=speculation.drafter.name,
        drafted_tokens=total.drafted,
        accepted_tokens=total.accepted,
        draft_positions=total.positions,
        verify_steps=speculation.verify_steps,
        draft_s=speculation.draft_s,
        draft_failures=speculation.failures,
        draft_stopped=speculation.stopped,
        speedup=speculation.speedup,
    )
