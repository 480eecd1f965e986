"""What an engine has done since it was loaded, and what it holds now."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from runtime.core import Core


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
            ]
        )

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
    )
