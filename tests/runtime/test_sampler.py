"""The sampling reference against published Philox vectors and against frequencies computed another way."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from runtime import sampler

LOGITS = np.array([1.2, 0.3, -0.5, 2.0, 2.0, -3.0, 0.9, 1.1], np.float32)
WORDS = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123, philox4x32 10
        ([0, 0, 0, 0], 0, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([WORDS] * 4, 2**64 - 1, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            0x299F31D0_A4093822,
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox(counter, key, expected):
    assert sampler.philox(np.array(counter, np.uint64), key).tolist() == expected
    batch = sampler.philox(np.array([counter, [1, 2, 3, 4]], np.uint64), key)
    assert batch[0].tolist() == expected


def softmax(x):
    e = np.exp(np.asarray(x, np.float64) - np.max(x))
    return e / e.sum()


def probabilities(logits, temperature, top_k, top_p, min_p):
    """What each token's frequency must be, token by token and in plain Python."""
    z = [float(x) / temperature for x in logits]
    keep = sorted(range(len(z)), key=lambda i: (-z[i], i))[: top_k or None]
    p, total, prefix = softmax([z[i] for i in keep]), 0.0, []
    for i, probability in zip(keep, p, strict=True):
        prefix.append(i)
        total += probability
        if top_p < 1 and total >= top_p:
            break
    final = [i for i, probability in zip(prefix, p, strict=False) if probability >= min_p * p[0]]
    out = np.zeros(len(z))
    out[final] = softmax([z[i] for i in final])
    return out


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 0, 1.0, 0.0),
        (1.0, 3, 1.0, 0.0),
        (1.5, 0, 0.7, 0.0),
        (1.0, 5, 0.8, 0.1),
        (1.0, 0, 1.0, 0.3),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 0.01, 0.0),
    ],
)
def test_frequencies(temperature, top_k, top_p, min_p):
    want = probabilities(LOGITS, temperature, top_k, top_p, min_p)
    count = 4000
    options = dict(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=3)
    drawn = [sampler.sample(LOGITS, position=p, **options) for p in range(count)]
    got = np.bincount(drawn, minlength=len(LOGITS)) / count
    assert got[want == 0].sum() == 0
    assert np.abs(got - want).max() < 4 * np.sqrt(0.25 / count)


def enumerated(logits, monkeypatch, cells, **options):
    """How often each token is sampled, over every combination of the tokens' noise: the middles of so many
    cells of a uniform."""
    middles = ((np.arange(cells) + 0.5) / cells * 2**32).astype(np.uint32)
    counts = np.zeros(len(logits))
    for words in itertools.product(middles, repeat=len(logits)):
        drawn = np.array(words, np.uint32)[:, None]
        monkeypatch.setattr(sampler, "philox", lambda counter, key, drawn=drawn: drawn)
        counts[sampler.sample(logits, **options)] += 1
    return counts / counts.sum()


SMALL = [([0.3, -0.4], 40, {}), ([1.1, 0.2, -0.5], 12, {}), ([0.9, 0.8, -0.5], 12, {"top_p": 0.6})]


@pytest.mark.parametrize(("logits", "cells", "filters"), SMALL)
def test_all_noise_gives_each_token_its_probability(monkeypatch, logits, cells, filters):
    """As closely as so many cells can."""
    want = probabilities(logits, 0.8, 0, filters.get("top_p", 1.0), 0.0)
    got = enumerated(logits, monkeypatch, cells, temperature=0.8, **filters)
    assert np.abs(got - want).max() < 0.2 / cells
    assert got[want == 0].sum() == 0


@pytest.mark.parametrize("wrong", [-1.0, 1.2, 0.8])
def test_noise_that_is_not_gumbels_gives_other_probabilities(monkeypatch, wrong):
    logits, cells, _ = SMALL[1]
    real = sampler.gumbel
    monkeypatch.setattr(sampler, "gumbel", lambda *key: wrong * real(*key))
    got = enumerated(logits, monkeypatch, cells, temperature=0.8)
    assert np.abs(got - probabilities(logits, 0.8, 0, 1.0, 0.0)).max() > 0.4 / cells


def test_greedy_takes_the_lowest_id_among_equals():
    assert sampler.sample(LOGITS, temperature=0.0) == 3
    assert sampler.sample(LOGITS, temperature=1.0, top_k=1, seed=9) == 3


def test_the_noise_depends_on_seed_position_and_sample_alone():
    base = sampler.gumbel(8, 5, 10, 0)
    assert (base == sampler.gumbel(8, 5, 10, 0)).all() and (base == sampler.gumbel(16, 5, 10, 0)[:8]).all()
    for other in (sampler.gumbel(8, 6, 10, 0), sampler.gumbel(8, 5, 11, 0), sampler.gumbel(8, 5, 10, 1)):
        assert (base != other).all()
    assert (sampler.gumbel(8, 5 + 2**32, 10, 0) != base).all(), "the key's high word counts"


def test_gumbel_noise_is_gumbel():
    noise = np.concatenate([sampler.gumbel(5000, 1, p, 0) for p in range(4)])
    assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.03)
    assert noise.std() == pytest.approx(np.pi / np.sqrt(6), abs=0.03)


def test_log_softmax_and_top():
    want = np.log(softmax(LOGITS))
    np.testing.assert_allclose(sampler.log_softmax(LOGITS), want, rtol=1e-12)
    ids, logprobs = sampler.top(LOGITS, 3)
    assert ids.tolist() == [3, 4, 0]
    np.testing.assert_allclose(logprobs, want[[3, 4, 0]])
