"""What proposes tokens: the interface between the engine and its drafters.

A draft is a guess at what the target will sample at a position. The target's step computes it like any known
token and samples the row before it, with the request's own noise: where that gives the draft, it was right,
and costs no step of its own. A drafter decides how many tokens a step gives, never which.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol, runtime_checkable

import numpy as np

from runtime.scheduler import Chunk
from runtime.sequence import Sequence
from runtime.speculation.confidence import Confidence


class Drafter(Protocol):
    """Used by the engine's thread alone. What it raises costs no request anything: the step goes on without
    drafts.

    name: what it was chosen by: "lookup", "self", or an artifact's path. setup_s: seconds of the last draft()
    that it spent on prompts, not on drafts.
    """

    name: str
    setup_s: float

    def draft(self, chunks: Seq[Chunk], wanted: Seq[int]) -> Seq[int]:
        """Write up to wanted[i] drafts of chunks[i] into its seq.ids, from seq.num_tokens on; how many each
        got.

        All have computed == num_tokens - 1: their one known token that is not in the cache is the draft's
        first input. The blocks for every draft are held, and are nobody else's. wanted[i] is at least 1, and
        seq.ids has room. A model that drafts draws the token of position p as the target does: by the
        request's parameters and its noise at p (SampleArgs with that position).
        """
        ...

    def settle(self, seq: Sequence) -> None:
        """After a step with drafts of it: its tokens up to seq.computed are right. What the drafter keeps of
        any beyond is not."""
        ...

    def forget(self, seq: Sequence) -> None:
        """It has finished, or was taken off its blocks; it may never have been drafted for. If it comes back,
        it is new."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DrawingDrafter(Drafter, Protocol):
    """One that draws its drafts, with the noise of their positions, and can say from what. The rejection rule
    accepts more of these; a drafter that cannot say is taken to be sure of each."""

    def distributions(self, chunk: Chunk) -> np.ndarray | None:
        """Of the drafts that it just wrote for a chunk, which has some: f64 [chunk.drafts, V]; None: it
        cannot say."""
        ...


@runtime_checkable
class ConfidentDrafter(Drafter, Protocol):
    """One that knows how sure it is of a draft, and ends where another is not worth its time."""

    confidence: Confidence
