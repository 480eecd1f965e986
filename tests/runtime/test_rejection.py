"""The rejection rule, enumerated: with every draft that a drafter may draw, and every uniform, the output is
the target's in distribution. Rules that are a little wrong are not."""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from runtime import sampler
from runtime.speculation import rejection
from runtime.speculation.rejection import Verdict, choose, outcomes, residual, uniforms, verify
from tests.runtime.chi_square import BIASED, LEAST, likelihood, tail

Model = Callable[[tuple[int, ...]], np.ndarray]  # what came before -> the next token's distribution, f64 [V]


def random_model(seed: int, vocab: int, zeros: float = 0.0) -> Model:
    """A distribution of its own for each beginning. zeros: the share of tokens that cannot come."""

    @functools.cache
    def model(before: tuple[int, ...]) -> np.ndarray:
        rng = np.random.default_rng([seed, len(before), *before])
        raw = rng.exponential(size=vocab) * (rng.random(vocab) >= zeros)
        raw[rng.integers(vocab)] += 0.01
        return raw / raw.sum()

    return model


def point(vocab: int, token: int) -> Model:
    return lambda before: np.eye(vocab)[(token + len(before)) % vocab]


def halves(vocab: int, low: bool) -> Model:
    """Of the lower or of the upper half of the tokens alone."""
    mass = (np.arange(vocab) < vocab // 2) == low
    return lambda before: mass / mass.sum()


ONE = random_model(0, 3)
PAIRS: dict[str, tuple[int, Model, Model]] = {
    "two tokens": (2, random_model(1, 2), random_model(2, 2)),
    "four tokens": (4, random_model(3, 4), random_model(4, 4)),
    "zeros": (4, random_model(5, 4, 0.5), random_model(6, 4, 0.5)),
    "equal": (3, ONE, ONE),
    "disjoint": (4, halves(4, True), halves(4, False)),
    "equal points": (3, point(3, 1), point(3, 1)),
    "different points": (3, point(3, 1), point(3, 2)),
    "a target that is a point": (3, point(3, 0), random_model(7, 3)),
    "a drafter that is a point": (3, random_model(8, 3), point(3, 0)),
    "next to equal": (3, ONE, lambda before: ONE(before) * (1 - 1e-15) + 1e-15 / 3),
    "tiny probabilities": (
        3,
        lambda _: np.array([1e-300, 1e-17, 1.0]),
        lambda _: np.array([0.5, 0.5, 1e-300]),
    ),
}


def rows(model: Model, drafts: tuple[int, ...]) -> np.ndarray:
    return np.stack([model(drafts[:at]) for at in range(len(drafts) + 1)])


def likelihoods(model: Model, vocab: int, count: int) -> np.ndarray:
    """Of all texts of so many tokens: f64 [V, ..., V]."""
    found = np.empty((vocab,) * count)
    for text in itertools.product(range(vocab), repeat=count):
        found[text] = np.prod([model(text[:at])[text[at]] for at in range(count)])
    return found


def texts(
    target: Model, drafter: Model, vocab: int, count: int, *, copied: tuple[int, ...] | None = None
) -> np.ndarray:
    """Of all texts of count + 1 tokens, how likely one step makes them with `count` drafts, and plain draws
    after it what it leaves open. copied: the drafts of a drafter that draws none."""
    found = np.zeros((vocab,) * (count + 1))
    for drafts in itertools.product(range(vocab), repeat=count):
        drawn = np.prod([drafter(drafts[:at])[drafts[at]] for at in range(count)])
        if copied is not None:
            drawn = float(drafts == copied)
        if drawn == 0.0:
            continue
        q = None if copied is not None else rows(drafter, drafts)[:count].reshape(count, vocab)
        for verdict, probability in outcomes(rows(target, drafts), q, drafts):
            text = (*drafts[: verdict.accepted], verdict.token)
            for rest in itertools.product(range(vocab), repeat=count - verdict.accepted):
                whole = text + rest
                after = [target(whole[:at])[whole[at]] for at in range(len(text), count + 1)]
                found[whole] += drawn * probability * np.prod(after)
    return found


@pytest.mark.parametrize("count", [0, 1, 2, 3])
@pytest.mark.parametrize("pair", PAIRS)
def test_the_output_is_the_targets(pair: str, count: int) -> None:
    vocab, target, drafter = PAIRS[pair]
    want = likelihoods(target, vocab, count + 1)
    assert np.abs(texts(target, drafter, vocab, count) - want).max() < 1e-12


@pytest.mark.parametrize("pair", ["four tokens", "zeros", "a target that is a point", "disjoint"])
@pytest.mark.parametrize("copied", [(0,), (3, 1), (2, 2, 2)])
def test_the_output_is_the_targets_whatever_is_copied(pair: str, copied: tuple[int, ...]) -> None:
    vocab, target, drafter = PAIRS[pair]
    copied = tuple(token % vocab for token in copied)
    got = texts(target, drafter, vocab, len(copied), copied=copied)
    assert np.abs(got - likelihoods(target, vocab, len(copied) + 1)).max() < 1e-12


WRONG = {
    "all are accepted": ("chance", lambda p, q, draft: 1.0),
    "the ratio is not bounded by what p has": (
        "chance",
        lambda p, q, draft: min(1.0, 1.05 * p[draft] / q[draft]),
    ),
    "the ratio is upside down": ("chance", lambda p, q, draft: min(1.0, q[draft] / p[draft])),
    "recovered from all of p": ("residual", lambda p, q: p),
    "recovered from the distance": ("residual", lambda p, q: np.abs(p - q) / np.abs(p - q).sum()),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_biased_rule_is_seen(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejection, *WRONG[wrong])
    vocab, target, drafter = PAIRS["four tokens"]
    got = texts(target, drafter, vocab, 2)
    assert np.abs(got - likelihoods(target, vocab, 3)).max() > 1e-3


def test_chances_are_the_papers() -> None:
    """Of one draft: the sum of min(p, q) is accepted, and what is not is (p - q)+."""
    vocab, target, drafter = PAIRS["four tokens"]
    p, q = target(()), drafter(())
    found = [(q[x], o) for x in range(vocab) for o in outcomes(rows(target, (x,)), q[None], (x,))]
    accepted = sum(drawn * o.probability for drawn, o in found if not o.verdict.recovered)
    assert abs(accepted - np.minimum(p, q).sum()) < 1e-14
    for token in range(vocab):
        recovered = [drawn * o.probability for drawn, o in found if o.verdict == Verdict(0, token, True)]
        assert abs(sum(recovered) - max(p[token] - q[token], 0.0)) < 1e-14
    np.testing.assert_allclose(residual(p, q).sum(), 1.0)
    assert residual(p, p) is p


def verdicts(p: np.ndarray, q: np.ndarray | None, drafts: tuple[int, ...], drawn: np.ndarray) -> np.ndarray:
    """Counts of each outcome, in the order of outcomes(). drawn: uniforms, [N, n + 1, 2]."""
    found = Counter(verify(p, q, drafts, each) for each in drawn)
    return np.array([found.pop(o.verdict, 0) for o in outcomes(p, q, drafts)] + [sum(found.values())])


@pytest.mark.parametrize("copied", [False, True])
def test_keyed_uniforms_give_each_outcome_as_often_as_enumerated(copied: bool) -> None:
    """And not where one uniform decides two things."""
    drafts, number = (1, 2, 0), 4000
    p = np.array([[0.1, 0.4, 0.2, 0.3], [0.2, 0.1, 0.5, 0.2], [0.6, 0.1, 0.1, 0.2], [0.4, 0.3, 0.2, 0.1]])
    q = None if copied else np.array([[0.2, 0.6, 0.1, 0.1], [0.1, 0.1, 0.8, 0.0], [0.9, 0.05, 0.0, 0.05]])
    chances = np.array([o.probability for o in outcomes(p, q, drafts)] + [0.0])
    drawn = uniforms(2**40 + 3, 0, range(4 * number)).reshape(number, 4, 2)
    assert likelihood(verdicts(p, q, drafts, drawn), chances) > LEAST
    for wrong in (drawn[:, :, :1].repeat(2, axis=2), drawn[:, :1].repeat(4, axis=1)):
        assert likelihood(verdicts(p, q, drafts, wrong), chances) < BIASED


def test_no_token_is_drawn_that_cannot_come() -> None:
    least, most = 2.0**-53, 1 - 2.0**-53
    distribution = np.array([0.0, 0.25, 0.0, 0.75, 0.0])
    assert [choose(distribution, u) for u in (least, 0.249, 0.251, most)] == [1, 1, 3, 3]
    nothing = np.zeros(2)
    assert rejection.chance(nothing, nothing, 0) == 0.0  # a draft of neither


def test_uniforms_are_philoxs_by_a_counter_of_their_own() -> None:
    seed, sample, positions = 2**63 + 12345, 7, [0, 5, 2**31 - 1]
    found = uniforms(seed, sample, positions)
    for row, position in zip(found.tolist(), positions, strict=True):
        words = sampler.philox(np.array([0, position, sample, 1], np.uint64), seed).tolist()
        for value, high, low in zip(row, words[::2], words[1::2], strict=True):
            assert value == (((high << 32 | low) >> 12) + 0.5) / 2**52 and 0 < value < 1
    again = [
        uniforms(*key, positions) for key in ((seed + 1, sample), (seed, sample + 1), (seed + 2**33, sample))
    ]
    assert all((other != found).all() for other in again)


def test_uniforms_are_uniform_and_independent() -> None:
    drawn = uniforms(11, 2, range(50_000))
    pairs = {"of a position": drawn, "of neighbours": np.stack([drawn[:-1, 1], drawn[1:, 0]], axis=1)}
    for name, each in pairs.items():
        cells = (each * 16).astype(int)
        counts = np.bincount(cells[:, 0] * 16 + cells[:, 1], minlength=256)
        assert likelihood(counts, np.full(256, 1 / 256)) > LEAST, name
    squared = np.bincount((drawn[:, 0] ** 1.1 * 16).astype(int), minlength=16)
    assert likelihood(squared, np.full(16, 1 / 16)) < BIASED


@pytest.mark.parametrize(
    ("x", "degrees"),
    [(10.828, 1), (13.816, 2), (24.322, 7), (29.588, 10), (59.703, 30), (149.449, 100)],
)
def test_tails_are_as_tabulated(x: float, degrees: int) -> None:
    """Critical values at 0.001, of any book of statistics."""
    assert abs(tail(x, degrees) - 0.001) < 2e-6


def test_probabilities_are_what_is_drawn_from() -> None:
    """Against frequencies in tests/runtime/test_sampler.py's own words."""
    from tests.runtime.test_sampler import LOGITS, probabilities

    for options in (
        (1.0, 0, 1.0, 0.0),
        (0.7, 3, 1.0, 0.0),
        (1.5, 0, 0.7, 0.0),
        (1.0, 5, 0.8, 0.1),
        (1.0, 0, 1.0, 0.3),
    ):
        np.testing.assert_allclose(
            sampler.probabilities(LOGITS, *options), probabilities(LOGITS, *options), rtol=1e-12
        )
    assert sampler.probabilities(LOGITS, 0.0, 2, 0.5).tolist() == np.eye(len(LOGITS))[3].tolist()
