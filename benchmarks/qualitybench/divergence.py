"""How far logits are from those of a reference, in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
ROWS = 256  # evaluated at once


@dataclass(frozen=True)
class Divergence:
    """Over all tokens but each window's last; KL(reference || other) in nats.

    perplexity_ratio: of the text, the other's over the reference's.
    """

    num_tokens: int
    mean_kl: float
    p99_kl: float
    top_agreement: float
    perplexity: float
    perplexity_ratio: float


def divergence(reference: Array, other: Array, windows: Array) -> Divergence:
    """Of logits [W, S, V] for token ids [W, S]. Raises ValueError where a logit is no finite number."""
    kl, same, wanted, given = [], [], [], []
    for ids, exact, found in zip(windows, reference, other, strict=True):
        for start in range(0, len(ids) - 1, ROWS):
            rows = slice(start, min(start + ROWS, len(ids) - 1))
            p, q = log_softmax(exact[rows]), log_softmax(found[rows])
            kl.append((np.exp(p) * (p - q)).sum(-1))
            same.append(p.argmax(-1) == q.argmax(-1))
            following = ids[rows.start + 1 : rows.stop + 1]
            wanted.append(p[np.arange(len(following)), following])
            given.append(q[np.arange(len(following)), following])
    nats, exact_nll, found_nll = (
        np.concatenate(kl),
        -np.concatenate(wanted).mean(),
        -np.concatenate(given).mean(),
    )
    return Divergence(
        len(nats),
        float(nats.mean()),
        float(np.quantile(nats, 0.99)),
        float(np.concatenate(same).mean()),
        float(np.exp(found_nll)),
        float(np.exp(found_nll - exact_nll)),
    )


def log_softmax(logits: Array) -> Array:
    """Along the last axis. Raises ValueError where one is no finite number."""
    x = np.asarray(logits, np.float64)
    if not np.isfinite(x).all():
        raise ValueError("a logit is no finite number")
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))
