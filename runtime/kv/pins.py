"""Blocks that are promised to pinned prefixes, and so are not there for what one request may need."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from runtime.kv.blocks import chain_hash, chain_root
from runtime.kv.group import Group
from runtime.sequence import Sequence


class Pins:
    """Sequences of whole blocks, from before they are computed until they are let go."""

    def __init__(self, groups: Seq[Group], block: int) -> None:
        self._groups, self._block = groups, block
        self._pinned: tuple[Sequence, ...] = ()  # replaced as a whole: any thread may read it
        self._has_parts = any(group.window is not None or group.state for group in groups)

    def add(self, seq: Sequence) -> None:
        self._pinned += (seq,)

    def remove(self, seq: Sequence) -> None:
        """Again: nothing."""
        self._pinned = tuple(pinned for pinned in self._pinned if pinned is not seq)

    def __bool__(self) -> bool:
        return bool(self._pinned)

    def without(self, seq: Sequence) -> Pins:
        """What is promised to the others."""
        others = Pins(self._groups, self._block)
        others._pinned = tuple(pinned for pinned in self._pinned if pinned is not seq)
        return others

    def blocks(self, group: Group) -> int:
        """At most so many blocks of a group are held by pinned prefixes; those that several share, once."""
        held = (self._hashes(seq)[group.first_live(seq.num_tokens, self._block) :] for seq in self._pinned)
        return len(set().union(*held))

    def _hashes(self, seq: Sequence) -> list[bytes]:
        """Of its blocks, chained."""
        size, parent, hashes = self._block, chain_root(b"pins", seq.salt), []
        for at in range(0, seq.num_tokens, size):
            parent = chain_hash(parent, seq.ids[at : at + size].tobytes())
            hashes.append(parent)
        return hashes

    def shared(self, ids: np.ndarray, salt: bytes) -> int:
        """Blocks of full groups that a prompt is sure to share with a pinned prefix."""
        return max((self._common(seq, ids) for seq in self._pinned if seq.salt == salt), default=0)

    def _common(self, seq: Sequence, ids: np.ndarray) -> int:
        """Whole blocks at the start of both, but the prompt's last token, which no hit skips. A window's
        blocks, and a state's, are there for a hit on the whole only."""
        size = min(len(ids) - 1, seq.num_tokens)
        differ = np.flatnonzero(ids[:size] != seq.ids[:size])
        blocks = int(differ[0] if len(differ) else size) // self._block
        return blocks if not self._has_parts or blocks * self._block == seq.num_tokens else 0
