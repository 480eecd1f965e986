"""Random operations on a pool of blocks: what each costs, and whether it grows with the pool.

About half of the pool is held, and nearly all that is free is sealed: most allocations evict. What is drawn
and hashed is so between timed stretches, since a random number costs as much as an operation.

A larger pool leaves the processor's caches, so that each operation waits for memory more often, as plain
reads of as large a list and dictionary do. Whether the bookkeeping itself grows shows where a thousand blocks
are in use, of pools of all sizes.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pagingbench.report import Bound, Report
from runtime.kv.blocks import BlockPool, Sealed, chain_hash
from runtime.kv.table import Table

SIZES = (1_000, 10_000, 100_000, 1_000_000)
OPERATIONS = 10_000_000
MOST_US = 3.0
MOST_GROWTH = 1.3  # with as many blocks in use
IN_USE = 1_000
STRETCH = 50_000  # most operations between two readings of the clock
KINDS = ("allocate", "release", "retain", "seal", "find")
GROWING, SHRINKING = (35, 20, 5, 25, 15), (20, 35, 5, 25, 15)  # how often each is drawn

Operation = tuple[str, int, Sealed]  # kind, a random number that chooses the block, a content


@dataclass
class Holder:
    """Stands for all sequences. held: a block as often as it is held. contents: what was sealed lately."""

    pool: BlockPool
    rng: random.Random
    held: list[int] = field(default_factory=list)
    contents: list[Sealed] = field(default_factory=list)
    number: int = 0

    def fill(self, blocks: int) -> None:
        """Seal so many blocks, and give a random half of them back."""
        for _ in range(blocks):
            self.held.append(self.pool.allocate())
            self.contents.append(self._content())
            self.pool.seal(self.held[-1], self.contents[-1])
        self.rng.shuffle(self.held)
        while len(self.held) > blocks // 2:
            self.pool.release(self.held.pop())

    def draw(self, count: int) -> list[Operation]:
        """Some of what is looked for was evicted; what is to be sealed is new."""
        weights = GROWING if len(self.held) < len(self.contents) // 2 else SHRINKING
        kinds = self.rng.choices(KINDS, weights, k=count)
        return [
            (
                kind,
                self.rng.getrandbits(40),
                self._content() if kind == "seal" else self.rng.choice(self.contents),
            )
            for kind in kinds
        ]

    def remember(self, operations: list[Operation]) -> None:
        for kind, number, content in operations:
            if kind == "seal":
                self.contents[number % len(self.contents)] = content

    def table(self) -> Table:
        table = Table()
        for block in self.held:
            table.append(block)
        return table

    def _content(self) -> Sealed:
        self.number += 1
        tokens = self.number.to_bytes(64, "little")
        return Sealed(chain_hash(b"", tokens), b"", tokens)


def apply(pool: BlockPool, held: list[int], operations: list[Operation]) -> None:
    """The timed loop."""
    for kind, number, content in operations:
        if kind == "allocate":
            if pool.num_free:
                held.append(pool.allocate())
        elif kind == "find":
            block = pool.find(content)
            if block is not None:
                pool.retain(block)
                held.append(block)
        elif held:
            at = number % len(held)
            block = held[at]
            if kind == "seal":
                pool.seal(block, content)
            elif kind == "retain":
                pool.retain(block)
                held.append(block)
            else:
                held[at] = held[-1]
                held.pop()
                pool.release(block)


def run(operations: int = OPERATIONS, sizes: tuple[int, ...] = SIZES, seed: int = 0) -> Report:
    """All operations on the largest pool, a tenth of them on each other."""
    rows = [
        measure(size, size, operations if size == max(sizes) else operations // 10, seed) for size in sizes
    ]
    few = [measure(size, min(IN_USE, *sizes), operations // 10, seed) for size in sizes]
    bounds = [
        Bound(f"us per operation, {max(sizes):,} blocks", rows[-1]["us"], MOST_US),
        Bound(
            f"growth from {sizes[0]:,} blocks on, {IN_USE:,} in use",
            few[-1]["us"] / few[0]["us"],
            MOST_GROWTH,
        ),
    ]
    figures = {
        "growth, all in use": rows[-1]["us"] / rows[0]["us"],
        "growth of plain reads": rows[-1]["read_us"] / rows[0]["read_us"],
        "all in use": rows,
        "few in use": few,
    }
    return Report("allocator", bounds, figures)


def measure(blocks: int, in_use: int, operations: int, seed: int) -> dict[str, Any]:
    """us: of the thread's time per operation, the loop that calls them included."""
    holder = Holder(BlockPool(blocks), random.Random(seed))
    holder.fill(in_use)
    kinds: Counter[str] = Counter()
    stretch, spent, done = min(STRETCH, in_use), 0.0, 0
    while done < operations:
        drawn = holder.draw(min(stretch, operations - done))
        start = time.thread_time()
        apply(holder.pool, holder.held, drawn)
        spent += time.thread_time() - start
        holder.remember(drawn)
        kinds.update(kind for kind, _, _ in drawn)
        done += len(drawn)
    evictions = holder.pool.evictions
    holder.pool.check([holder.table()])
    return {
        "blocks": blocks, "operations": done, "us": spent / done * 1e6, "read_us": read_us(in_use, seed),
        "evict": evictions, **{kind: kinds[kind] for kind in KINDS},
    }  # fmt: skip


def read_us(size: int, seed: int, reads: int = 500_000) -> float:
    """A random read of a list and one of a dictionary by 16 bytes, both of this size: what memory costs."""
    rng = random.Random(seed)
    values = [[i] for i in range(size)]
    keys = [rng.randbytes(16) for _ in range(size)]
    table = dict(zip(keys, values, strict=True))
    chosen = [(rng.randrange(size), rng.choice(keys)) for _ in range(reads)]
    start = time.thread_time()
    for at, key in chosen:
        assert values[at] is not None and table[key] is not None
    return (time.thread_time() - start) / reads * 1e6
