"""Prefixes that sequences share: which the pools can serve, and which are being computed.

A hit is the longest run of full blocks that every group can serve: a full group needs all of them, a window
group those that the next token can still see, a state the last one, a tail none. It leaves at least the last
token to compute.

A state's block is kept where a hit is likely to end, and few others are. What a prompt has in common with
those that were computed lately, or are, says where that is: the block there is *wanted*, and whoever computes
it keeps it (Cache.keep_hits).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from runtime.kv.blocks import BlockPool, Sealed, chain_hash, chain_root
from runtime.kv.group import Group
from runtime.sequence import Sequence

MOST_KNOWN = 2**15  # hashes of blocks that were computed lately


class Prefixes:
    """coming: hashes of full blocks that admitted sequences have yet to compute, and of how many."""

    def __init__(self, groups: Seq[Group], pools: Seq[BlockPool], block: int, salt: bytes) -> None:
        self._groups, self._pools, self._block, self._salt = groups, pools, block, salt
        self.coming: Counter[bytes] = Counter()
        self._has_states = any(group.state for group in groups)
        self._known: OrderedDict[bytes, None] = OrderedDict()  # where there are states; the latest last
        self._wanted: set[bytes] = set()  # of those that are coming

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

    def is_coming(self, chain: Seq[Sealed], hit: int) -> bool:
        """Whether more of the chain than `hit` blocks, which are found, is soon a hit: it is being computed.
        The last such block is wanted then."""
        if not self._has_states:
            return hit < len(chain) and chain[hit].hash in self.coming
        coming = [content.hash for content in self._met(chain, hit) if content.hash in self.coming]
        self._wanted.update(coming[-1:])
        return bool(coming)

    def is_wanted(self, content: Sealed) -> bool:
        return content.hash in self._wanted

    def announce(self, seq: Sequence, start: int, stop: int) -> None:
        """The sequence will compute its full blocks [start, stop), of which the last that was computed before
        is wanted: others may begin like both."""
        if self._has_states:
            self._wanted.update(content.hash for content in self._met(seq.chain[:stop], start)[-1:])
        seq.coming = range(start, max(start, stop))
        for i in seq.coming:
            self.coming[seq.chain[i].hash] += 1

    def remember(self, contents: Iterable[Sealed]) -> None:
        """Blocks were computed."""
        if not self._has_states:
            return
        for content in contents:
            self._known[content.hash] = None
            self._known.move_to_end(content.hash)
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def arrive(self, seq: Sequence, stop: int) -> None:
        """It has computed those before `stop`, or never will."""
        for i in range(seq.coming.start, min(stop, seq.coming.stop)):
            self.coming[seq.chain[i].hash] -= 1
            if not self.coming[seq.chain[i].hash]:
                del self.coming[seq.chain[i].hash]
                self._wanted.discard(seq.chain[i].hash)
        seq.coming = range(max(stop, seq.coming.start), max(stop, seq.coming.stop))

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that what is coming is what the holders of blocks have yet to compute."""
        coming = Counter(seq.chain[i].hash for seq in holders for i in seq.coming)
        assert coming == self.coming, "what is expected differs from what is being computed"
        assert self._wanted <= coming.keys(), "what nobody computes is wanted"

    def _met(self, chain: Seq[Sealed], start: int) -> list[Sealed]:
        """The blocks from `start` on, up to the first that was neither computed lately nor is being."""
        end = start
        while end < len(chain) and (chain[end].hash in self.coming or chain[end].hash in self._known):
            end += 1
        return list(chain[start:end])

    def _served(self, group: Group, pool: BlockPool, chain: list[Sealed], most: int) -> int:
        """The longest prefix of at most `most` blocks that this group can serve."""
        if group.tail:
            return most  # the next token begins a block
        if group.is_full:
            return next((i for i in range(most) if pool.find(chain[i]) is None), most)
        run = [0]  # run[i]: how many blocks before index i are found without a gap
        for content in chain[:most]:
            run.append(run[-1] + 1 if pool.find(content) is not None else 0)
        fits = (n for n in range(most, 0, -1) if run[n] >= n - group.first_live(n * self._block, self._block))
        return next(fits, 0)
