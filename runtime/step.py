"""Packing a step: the chunks of all its requests, end to end on one token axis, in arrays made once.

T tokens, R requests, Q rows, M blocks per request. See the C ABI in docs/artifact.md.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from runtime.scheduler import Chunk, Limits


@dataclass(frozen=True, slots=True)
class Step:
    """Views of the packed arrays, i32, valid until the next step is packed. Sampled rows come first."""

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
        self._range = np.arange(max(tokens, requests), dtype=np.int32)

    def pack(self, chunks: Seq[Chunk]) -> Step:
        """The step that computes `chunks`; each sequence holds blocks for its chunk."""
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
        ids = self._pack_ids(chunks, num_tokens)
        rows = self._pack_rows(chunks, starts)
        tables = [self._pack_table(chunks, g) for g in range(len(self._tables))]
        slots = [
            self._pack_slots(table, owner, pos, out) for table, out in zip(tables, self._slots, strict=True)
        ]
        return Step(ids, pos, starts, lens, rows, slots, tables)

    def _pack_ids(self, chunks: Seq[Chunk], num_tokens: int) -> np.ndarray:
        ids, at = self._ids[:num_tokens], 0
        for c in chunks:
            first = c.seq.computed
            ids[at : at + c.count] = c.seq.ids[first : first + c.count]
            at += c.count
        return ids

    def _pack_rows(self, chunks: Seq[Chunk], starts: np.ndarray) -> np.ndarray:
        """The rows to sample, in the chunks' order, then those to score, in the chunks' order."""
        rows = [end - 1 for c, end in zip(chunks, starts[1:].tolist(), strict=True) if c.sample]
        for c, start in zip(chunks, starts[:-1].tolist(), strict=True):
            if c.score:
                rows += [start + position - c.seq.computed for position in c.score]
        view = self._rows[: len(rows)]
        view[:] = rows
        return view

    def _pack_table(self, chunks: Seq[Chunk], group: int) -> np.ndarray:
        table = self._tables[group][: len(chunks)]
        for row, c in zip(table, chunks, strict=True):
            source = c.seq.tables[group]
            row[: source.length] = source.ids[: source.length]
        return table

    def _pack_slots(
        self, table: np.ndarray, owner: np.ndarray, pos: np.ndarray, buffer: np.ndarray
    ) -> np.ndarray:
        slots = buffer[: len(pos)]
        index, offset = np.divmod(pos, self.block)
        np.add(table[owner, index] * self.block, offset, out=slots)
        return slots
