"""Packing a step: the chunks of all its requests, end to end on one token axis, in arrays made once.

T tokens, R requests, Q rows, M blocks per request. See the C ABI in docs/artifact.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from runtime.kv.table import Table
from runtime.limits import Limits
from runtime.scheduler import Chunk


@dataclass(frozen=True, slots=True)
class Step:
    """Views of the packed arrays, i32, valid until the next step is packed. Sampled rows come first.

    Steps of equal sizes are one object, whose arrays change: what was derived from them once stays right.
    """

    ids: np.ndarray  # [T]
    pos: np.ndarray  # [T]
    starts: np.ndarray  # [R+1]
    lens: np.ndarray  # [R]
    rows: np.ndarray  # [Q]
    slots: list[np.ndarray]  # per group [T]
    tables: list[np.ndarray]  # per group [R, M]


class StepBuffers:
    """Arrays for the largest step."""

    def __init__(self, limits: Limits, num_groups: int, max_context: int, block: int) -> None:
        tokens, requests = limits.max_step_tokens, limits.max_requests
        self.block = block
        self._ids, self._pos = np.zeros(tokens, np.int32), np.zeros(tokens, np.int32)
        self._starts, self._lens = np.zeros(requests + 1, np.int32), np.zeros(requests, np.int32)
        self._rows = np.zeros(limits.max_rows, np.int32)
        self._slots = [np.zeros(tokens, np.int32) for _ in range(num_groups)]
        width = -(-max_context // block)
        self._tables = [np.zeros((requests, width), np.int32) for _ in range(num_groups)]
        self._packed: list[list[tuple[Table | None, int]]] = [
            [(None, 0)] * requests for _ in range(num_groups)
        ]
        self._range = np.arange(max(tokens, requests) + 1, dtype=np.int32)
        self._step: Step | None = None

    def pack(self, chunks: Seq[Chunk]) -> Step:
        """The step that computes `chunks`; each sequence holds blocks for its chunk."""
        for group in range(len(self._tables)):
            self._pack_tables(chunks, group)
        num_tokens = sum([c.count for c in chunks])
        pack = self._pack_tokens if num_tokens == len(chunks) else self._pack_chunks
        pack(chunks)
        return self._views(num_tokens, len(chunks), self._pack_rows(chunks))

    def _views(self, num_tokens: int, num_requests: int, num_rows: int) -> Step:
        step = self._step
        if step is not None and (len(step.ids), len(step.lens), len(step.rows)) == (
            num_tokens,
            num_requests,
            num_rows,
        ):
            return step
        self._step = Step(
            self._ids[:num_tokens],
            self._pos[:num_tokens],
            self._starts[: num_requests + 1],
            self._lens[:num_requests],
            self._rows[:num_rows],
            [slots[:num_tokens] for slots in self._slots],
            [table[:num_requests] for table in self._tables],
        )
        return self._step

    def _pack_tables(self, chunks: Seq[Chunk], group: int) -> None:
        """Copy the tables that are not where they were in the last step, or have changed since."""
        packed, target = self._packed[group], self._tables[group]
        for row, c in enumerate(chunks):
            table = c.seq.tables[group]
            if packed[row] != (table, table.version):
                target[row, : table.length] = table.ids[: table.length]
                packed[row] = (table, table.version)

    def _pack_tokens(self, chunks: Seq[Chunk]) -> None:
        """One token per chunk, as in nearly every step: plain numbers are faster than arrays of few."""
        count = len(chunks)
        pos = [c.seq.computed for c in chunks]
        self._ids[:count] = [c.seq.ids.item(p) for c, p in zip(chunks, pos, strict=True)]
        self._pos[:count] = pos
        self._starts[: count + 1] = self._range[: count + 1]
        self._lens[:count] = [p + 1 for p in pos]
        block = self.block
        for group, slots in enumerate(self._slots):
            slots[:count] = [
                c.seq.tables[group].ids.item(p // block) * block + p % block
                for c, p in zip(chunks, pos, strict=True)
            ]

    def _pack_chunks(self, chunks: Seq[Chunk]) -> None:
        num_requests = len(chunks)
        counts = np.array([c.count for c in chunks], np.int32)
        computed = np.array([c.seq.computed for c in chunks], np.int32)
        starts, lens = self._starts[: num_requests + 1], self._lens[:num_requests]
        np.cumsum(counts, out=starts[1:])
        np.add(computed, counts, out=lens)
        num_tokens = int(starts[-1])
        owner = np.repeat(self._range[:num_requests], counts)  # [T] which request a token is of
        pos = self._pos[:num_tokens]
        np.add(self._range[:num_tokens], (computed - starts[:-1])[owner], out=pos)
        for c, at in zip(chunks, starts.tolist(), strict=False):
            self._ids[at : at + c.count] = c.seq.ids[c.seq.computed : c.seq.computed + c.count]
        index, offset = np.divmod(pos, self.block)
        for table, slots in zip(self._tables, self._slots, strict=True):
            np.add(table[owner, index] * self.block, offset, out=slots[:num_tokens])

    def _pack_rows(self, chunks: Seq[Chunk]) -> int:
        """The rows to sample, in the chunks' order, then those to score, in the chunks' order; how many."""
        starts = self._starts[: len(chunks) + 1].tolist()
        if max([c.samples for c in chunks]) > 1:
            ends = zip(chunks, starts[1:], strict=True)
            rows = [row for c, end in ends for row in range(end - c.samples, end)]
        else:  # as in most steps
            rows = [end - 1 for c, end in zip(chunks, starts[1:], strict=True) if c.samples]
        for c, start in zip(chunks, starts, strict=False):
            if c.score:
                rows += [start + position - c.seq.computed for position in c.score]
        self._rows[: len(rows)] = rows
        return len(rows)
