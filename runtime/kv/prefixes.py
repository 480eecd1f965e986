"""Prefixes that sequences share: which the pools can serve, and which are being computed.

A hit is the longest run of full blocks that every group can serve: a full group needs all of them, a window
group those that the next token can still see, a tail none. It leaves at least the last token to compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from runtime.kv.blocks import BlockPool, Sealed, chain_hash, chain_root
from runtime.kv.group import Group
from runtime.sequence import Sequence


class Prefixes:
    """coming: hashes of full blocks that admitted sequences have yet to compute, and of how many."""

    def __init__(self, groups: Seq[Group], pools: Seq[BlockPool], block: int, salt: bytes) -> None:
        self._groups, self._pools, self._block, self._salt = groups, pools, block, salt
        self.coming: Counter[bytes] = Counter()

    def hit(self, seq: Sequence) -> tuple[int, list[Sealed]]:
        """How many blocks the longest prefix has that every group can serve, and the contents of all that
        could be served."""
        best = min(seq.num_tokens - 1, seq.hit_limit) // self._block
        chain = self.chain(seq, best)[:best]
        while best > 0:  # every group shortens it until all agree
            served = min(
                self._served(g, p, chain, best) for g, p in zip(self._groups, self._pools, strict=True)
            )
            if served == best:
                break
            best = served
        return best, chain

    def chain(self, seq: Sequence, length: int) -> list[Sealed]:
        """Contents of the first `length` full blocks; kept, because known tokens never change."""
        chain = seq.chain
        while len(chain) < length:
            at = len(chain) * self._block
            parent = chain[-1].hash if chain else chain_root(self._salt, seq.salt)
            tokens = seq.ids[at : at + self._block].tobytes()
            chain.append(Sealed(chain_hash(parent, tokens), parent, tokens))
        return chain

    def is_coming(self, content: Sealed) -> bool:
        return content.hash in self.coming

    def announce(self, seq: Sequence, start: int, stop: int) -> None:
        """The sequence will compute its full blocks [start, stop)."""
        seq.coming = range(start, max(start, stop))
        for i in seq.coming:
            self.coming[seq.chain[i].hash] += 1

    def arrive(self, seq: Sequence, stop: int) -> None:
        """It has computed those before `stop`, or never will."""
        for i in range(seq.coming.start, min(stop, seq.coming.stop)):
            self.coming[seq.chain[i].hash] -= 1
            if not self.coming[seq.chain[i].hash]:
                del self.coming[seq.chain[i].hash]
        seq.coming = range(max(stop, seq.coming.start), max(stop, seq.coming.stop))

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that what is coming is what the holders of blocks have yet to compute."""
        coming = Counter(seq.chain[i].hash for seq in holders for i in seq.coming)
        assert coming == self.coming, "what is expected differs from what is being computed"

    def _served(self, group: Group, pool: BlockPool, chain: list[Sealed], most: int) -> int:
        """The longest prefix of at most `most` blocks that this group can serve."""
        if group.tail:
            return most  # the next token begins a block
        if group.window is None:
            return next((i for i in range(most) if pool.find(chain[i]) is None), most)
        run = [0]  # run[i]: how many blocks before index i are found without a gap
        for content in chain[:most]:
            run.append(run[-1] + 1 if pool.find(content) is not None else 0)
        fits = (n for n in range(most, 0, -1) if run[n] >= n - group.first_live(n * self._block, self._block))
        return next(fits, 0)
