"""The rejection rule (Leviathan, Kalman, Matias: "Fast inference from transformers via speculative decoding",
arXiv 2211.17192): which drafts stay, and the token after them.

A draft x of a drafter that draws from q is accepted with the chance min(1, p(x) / q(x)), p being the target's
distribution at its position. At the first that is not, a token is *recovered* from what p has beyond q. After
the last one a *bonus* token is drawn from p. Each token is then one of p, whatever q is: the distribution of
the output is the target's, but not its bits, which depend on how many tokens were drafted.

Of a draft that no chance decided (prompt lookup copies it) q is all on that token. That is right of any draft
that was found without the uniforms of its position, and accepts no more of them than the drafter's own q.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from runtime.sampler import philox

_STREAM = 1  # the counter's last word, which is 0 for the noise of tokens
_BITS = 52  # of a uniform: the most that leave room for half a step


class Verdict(NamedTuple):
    """accepted: how many drafts, from the first on. token: the one that follows them, a bonus where all are
    accepted and else recovered."""

    accepted: int
    token: int
    recovered: bool


class Outcome(NamedTuple):
    """One that is possible, and its probability."""

    verdict: Verdict
    probability: float


def verify(p: np.ndarray, q: np.ndarray | None, drafts: Seq[int], uniforms: np.ndarray) -> Verdict:
    """Drafts d_1 to d_n at n positions.

    p: f64 [n+1, V], the target's distributions at their positions and after. q: f64 [n, V], those that the
    drafts were drawn from; None: all on the draft. uniforms: f64 [n+1, 2] in (0, 1), of each position, see
    uniforms().
    """
    for at, draft in enumerate(drafts):
        drawn_from = _point(draft, p.shape[1]) if q is None else q[at]
        if uniforms[at, 0] >= chance(p[at], drawn_from, draft):
            return Verdict(at, choose(residual(p[at], drawn_from), uniforms[at, 1]), True)
    return Verdict(len(drafts), choose(p[len(drafts)], uniforms[len(drafts), 1]), False)


def outcomes(p: np.ndarray, q: np.ndarray | None, drafts: Seq[int]) -> list[Outcome]:
    """All that verify may say of these drafts, over all uniforms; what has no probability left out."""
    found: list[Outcome] = []
    so_far = 1.0
    for at, draft in enumerate(drafts):
        drawn_from = _point(draft, p.shape[1]) if q is None else q[at]
        accepted = chance(p[at], drawn_from, draft)
        if accepted < 1.0:
            found += _each(at, True, so_far * (1.0 - accepted), residual(p[at], drawn_from))
        so_far *= accepted
    return found + _each(len(drafts), False, so_far, p[len(drafts)])


def chance(p: np.ndarray, q: np.ndarray, draft: int) -> float:
    """That a draft is accepted. One that p has not at all never is, even where q has not either."""
    if p[draft] <= 0.0:
        return 0.0
    return 1.0 if p[draft] >= q[draft] else float(p[draft] / q[draft])


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """What p has beyond q, as a distribution: f64 [V]; p itself where it has nothing beyond q."""
    beyond = np.maximum(p - q, 0.0)
    total = beyond.sum()
    return beyond / total if total > 0.0 else p


def choose(distribution: np.ndarray, uniform: float) -> int:
    """The token at a uniform's place, by cumulated probability; never one of probability 0."""
    cumulated = np.cumsum(distribution)
    return int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))


def uniforms(seed: int, sample_index: int, positions: Seq[int]) -> np.ndarray:
    """Of each position, whether its draft is accepted and which token is drawn: f64 [N, 2], in (0, 1).

    From the generator that the noise of tokens comes from, by a counter that no noise has.
    """
    counter = np.zeros((len(positions), 4), np.uint64)
    counter[:, 1], counter[:, 2], counter[:, 3] = positions, sample_index, _STREAM
    words = philox(counter, seed).astype(np.uint64)  # [N, 4]
    whole = (words[:, ::2] << np.uint64(32) | words[:, 1::2]) >> np.uint64(64 - _BITS)
    return (whole.astype(np.float64) + 0.5) * 2.0**-_BITS


def _point(token: int, vocab_size: int) -> np.ndarray:
    point = np.zeros(vocab_size)
    point[token] = 1.0
    return point


def _each(accepted: int, recovered: bool, weight: float, distribution: np.ndarray) -> list[Outcome]:
    """With each token that may follow. weight: of all together."""
    return [
        Outcome(Verdict(accepted, token, recovered), weight * float(distribution[token]))
        for token in np.flatnonzero(distribution).tolist()
        if weight > 0.0
    ]
