"""Whether counts are those of a distribution: Pearson's test."""

from __future__ import annotations

import math

import numpy as np

LEAST = 1e-4  # a right sampler's counts are less likely with one seed of 10,000: seeds in tests are fixed
BIASED = 1e-12  # as unlikely a biased one's must be
FEWEST = 5.0  # expected counts of a cell; rarer ones are taken together


def likelihood(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """How likely counts this far or farther off are; 0 where something came that cannot."""
    if counts[probabilities == 0].sum():
        return 0.0
    expected = probabilities * counts.sum()
    rare = expected < FEWEST
    seen = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    return tail(float(((seen - wanted) ** 2 / wanted).sum()), len(seen) - 1)


def tail(x: float, degrees: int) -> float:
    """That a chi-square variable of so many degrees of freedom, at least one, is above x."""
    if x <= 0.0:
        return 1.0
    half = x / 2
    first = 0.0 if degrees % 2 == 0 else math.erfc(math.sqrt(half))
    powers = np.arange(degrees // 2) + degrees % 2 / 2
    return first + sum(math.exp(s * math.log(half) - half - math.lgamma(s + 1)) for s in powers.tolist())
