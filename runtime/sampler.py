"""Sampling, the slow obvious way, in float64, rule by rule as docs/artifact.md defines it.

The engine samples with compiled code; this is the reference that it is tested against. Distributions, which
the rejection rule needs, it takes from here.

Noise comes from Philox-4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
SC'11), keyed by seed and counted by (token id, position, sample index), so that a token does not depend on
when it was sampled.
"""

from __future__ import annotations

import numpy as np

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_LOW, _32 = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox(counter: np.ndarray, key: int) -> np.ndarray:
    """Ten rounds of Philox-4x32: u32 [..., 4]. counter: [..., 4], 32 bits each; key: 64, low word first."""
    x0, x1, x2, x3 = (np.asarray(counter)[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(10):
        p0, p1 = x0 * _M0, x2 * _M1
        x0, x1, x2, x3 = (
            (p1 >> _32) ^ x1 ^ np.uint64(k0),
            p1 & _LOW,
            (p0 >> _32) ^ x3 ^ np.uint64(k1),
            p0 & _LOW,
        )
        k0, k1 = (k0 + _W0) & 0xFFFFFFFF, (k1 + _W1) & 0xFFFFFFFF
    return np.stack([x0, x1, x2, x3], axis=-1).astype(np.uint32)


def gumbel(vocab_size: int, seed: int, position: int, sample_index: int) -> np.ndarray:
    """Gumbel noise of every token id: f64 [V]. position: the one that the sampled token will take."""
    counter = np.zeros((vocab_size, 4), np.uint64)
    counter[:, 0] = np.arange(vocab_size)
    counter[:, 1], counter[:, 2] = position, sample_index
    uniform = ((philox(counter, seed)[:, 0] >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
    return -np.log(-np.log(uniform))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """f64, over the last axis."""
    x = np.asarray(logits, np.float64)
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def kept(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Which tokens may be sampled: bool [V]. temperature > 0."""
    z = np.asarray(logits, np.float64) / temperature
    order = np.argsort(-z, kind="stable")  # descending; equal values: lowest id first
    if top_k:
        order = order[:top_k]
    probs = np.exp(log_softmax(z[order]))
    if top_p < 1.0:
        length = int(np.searchsorted(np.cumsum(probs), top_p)) + 1
        order, probs = order[:length], probs[:length]
    mask = np.zeros(z.shape, bool)
    mask[order[probs >= min_p * probs[0]]] = True
    return mask


def sample(
    logits: np.ndarray,
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    sample_index: int = 0,
    position: int = 0,
) -> int:
    """The token that follows, from one row of logits [V]."""
    if temperature == 0:
        return int(np.argmax(logits))  # the lowest id among equals
    mask = kept(logits, temperature, top_k, top_p, min_p)
    noisy = np.asarray(logits, np.float64) / temperature + gumbel(len(logits), seed, position, sample_index)
    return int(np.argmax(np.where(mask, noisy, -np.inf)))


def probabilities(
    logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """What `sample` draws from, over all noise: f64 [V], of one row of logits [V]."""
    out = np.zeros(len(logits))
    if temperature == 0:
        out[np.argmax(logits)] = 1.0
        return out
    z = np.asarray(logits, np.float64) / temperature
    out = np.exp(z - z.max())  # of the likeliest 1
    if top_k or top_p < 1.0:  # only then the order counts, which takes long to find
        out[~kept(logits, temperature, top_k, top_p, min_p)] = 0.0
    else:
        out[out < min_p] = 0.0
    return out / out.sum()


def top(logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` likeliest ids (equal: lowest first) and their log-probabilities, of one row [V]."""
    ids = np.argsort(-np.asarray(logits, np.float64), kind="stable")[:count]
    return ids.astype(np.int32), log_softmax(logits)[ids]
