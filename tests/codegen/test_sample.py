"""The compiled sampler against runtime.sampler, the definition in float64."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime import sampler
from tests.codegen.harness import build_cpp, pointer
from tests.runtime.chi_square import BIASED, LEAST, likelihood

VOCAB = 5003
SOURCE = """#include "sample.h"
using namespace octavo;
#define EXPORT extern "C" __attribute__((visibility("default")))
EXPORT int32_t sample_rows(const octavo_sample_args* a, int threads) {
  Pool pool(threads);
  return sample(pool, *a);
}
EXPORT void score(const float* l, int64_t rows, int64_t V, const int32_t* ids, float* out) {
  Pool pool(2);
  logprobs(pool, l, rows, V, ids, out);
}
EXPORT int opens_pool(int threads) {
  try {
    Pool pool(threads);
    return 1;
  } catch (const std::system_error&) {
    return 0;
  }
}
EXPORT uint32_t first_word(uint64_t key, uint32_t a, uint32_t b, uint32_t c) {
  int32_t ids[W] = {int32_t(a)};
  uint32_t words[W];
  philox(key, ids, b, c, words);
  return words[0];
}
EXPORT void noise(const int32_t* ids, uint64_t seed, int32_t position, int32_t sample, double* out) {
  uint32_t words[W];
  philox(seed, ids, uint32_t(position), uint32_t(sample), words);
  gumbel(words, out);
}
"""


class Args(ctypes.Structure):
    _fields_ = [(n, ctypes.c_int32) for n in ("num_rows", "vocab_size", "num_top")] + [
        (n, ctypes.c_void_p)
        for n in (
            "logits", "temperature", "top_p", "min_p", "top_k", "seed", "sample_index", "position", "ids",
            "logprobs", "top_ids", "top_logprobs",
        )
    ]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    found = build_cpp(SOURCE, Path(tmp_path_factory.mktemp("sample")))
    found.first_word.restype = ctypes.c_uint32
    return found


def run(
    library: ctypes.CDLL,
    logits: np.ndarray,
    settings: list[dict[str, Any]],
    num_top: int = 0,
    threads: int = 2,
    *,
    logprobs: bool = True,
) -> dict[str, np.ndarray]:
    rows, vocab = logits.shape
    defaults = {
        "temperature": 1.0,
        "top_p": 1.0,
        "min_p": 0.0,
        "top_k": 0,
        "seed": 0,
        "sample_index": 0,
        "position": 0,
    }
    kinds = {"top_k": np.int32, "seed": np.uint64, "sample_index": np.int32, "position": np.int32}
    columns = {
        n: np.array([s.get(n, d) for s in settings], kinds.get(n, np.float32)) for n, d in defaults.items()
    }
    out = {
        "ids": np.full(rows, -9, np.int32),
        "logprobs": np.full(rows, np.nan, np.float32),
        "top_ids": np.full((rows, num_top), -9, np.int32),
        "top_logprobs": np.full((rows, num_top), np.nan, np.float32),
    }
    logits = np.ascontiguousarray(logits, np.float32)
    arrays = {"logits": logits, **columns, **out}
    args = Args(rows, vocab, num_top, **{n: pointer(a) for n, a in arrays.items()})
    if not logprobs:
        args.logprobs = None
    out["error"] = np.array(library.sample_rows(ctypes.byref(args), threads))
    return out


def random_logits(rows: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 2.5).astype(np.float32)


def test_philox_known_answer(library: ctypes.CDLL) -> None:
    """Key 0, counter 0, from the authors' known-answer file."""
    assert library.first_word(ctypes.c_uint64(0), 0, 0, 0) == 0x6627E8D5


def test_noise_is_the_definitions(library: ctypes.CDLL) -> None:
    ids, out = np.arange(16, dtype=np.int32), np.full(16, np.nan)
    library.noise(
        ctypes.c_void_p(pointer(ids)),
        ctypes.c_uint64(0xDEADBEEF12345678),
        77,
        3,
        ctypes.c_void_p(pointer(out)),
    )
    want = sampler.gumbel(16, 0xDEADBEEF12345678, 77, 3)
    assert np.allclose(out, want, rtol=1e-12, atol=1e-12)


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_k": VOCAB + 5},
    {"temperature": 0.9, "top_p": 0.3},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 1.5, "top_p": 0.9999},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.5, "top_p": 1e-6},
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_token_is_the_definitions(library: ctypes.CDLL, setting: dict[str, Any]) -> None:
    logits = random_logits(40)
    keys = [{"seed": 11 * i + (1 << 40), "sample_index": i % 3, "position": 5 * i} for i in range(40)]
    got = run(library, logits, [{**setting, **k} for k in keys])
    temperature = setting.get("temperature", 1.0)
    rest = {k: v for k, v in setting.items() if k != "temperature"}
    want = [
        sampler.sample(row, temperature=temperature, **rest, **k) for row, k in zip(logits, keys, strict=True)
    ]
    assert got["ids"].tolist() == want and got["error"] == 0
    logprobs = sampler.log_softmax(logits)[np.arange(40), want]
    assert np.allclose(got["logprobs"], logprobs, rtol=2e-7, atol=2e-7)


CHAINS, WORDS, TOKENS = 500, 24, 100_000
DRAWN: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 9, "min_p": 0.05},
]


def counted(
    library: ctypes.CDLL, setting: dict[str, Any], skew: float = 0.0, position_of: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """How often each token follows each in texts of a model that knows the last token alone, [V, V], and its
    logits of them. skew: added to token 0's logits. position_of: all tokens', if not their own."""
    model = random_logits(WORDS, seed=17, vocab=WORDS) / 2
    given = model + skew * (np.arange(WORDS) == 0)
    counts, last = np.zeros((WORDS, WORDS), np.int64), np.zeros(CHAINS, np.int64)
    for position in range(1, TOKENS // CHAINS + 1):
        place = position if position_of is None else position_of
        keys = [{"seed": 2**41 + chain // 2, "sample_index": chain % 2} for chain in range(CHAINS)]
        settings = [{**setting, **key, "position": place} for key in keys]
        ids = run(library, given[last], settings, logprobs=False)["ids"]
        np.add.at(counts, (last, ids), 1)
        last = ids.astype(np.int64)
    return counts, model


def least_likely(counts: np.ndarray, model: np.ndarray, setting: dict[str, Any]) -> float:
    """Of what followed the tokens, which are as many chances of a rare one."""
    options = (
        setting.get(n, d) for n, d in (("temperature", 1.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
    )
    given = tuple(options)
    followed = [q for q in range(WORDS) if counts[q].sum() > 100]
    assert len(followed) > WORDS // 2 and counts.sum() == TOKENS
    return min(likelihood(counts[q], sampler.probabilities(model[q], *given)) for q in followed) * len(
        followed
    )


@pytest.mark.parametrize("setting", DRAWN, ids=str)
def test_texts_are_distributed_as_the_model_says(library: ctypes.CDLL, setting: dict[str, Any]) -> None:
    """100,000 tokens, each by the noise of its own seed, sample and position."""
    counts, model = counted(library, setting)
    assert least_likely(counts, model, setting) > LEAST


@pytest.mark.parametrize("wrong", [{"skew": 0.5}, {"position_of": 5}], ids=str)
def test_a_biased_sampler_is_seen(library: ctypes.CDLL, wrong: dict[str, Any]) -> None:
    """Which favours a token a little, or takes all tokens of a text by one noise."""
    counts, model = counted(library, {}, **wrong)
    assert least_likely(counts, model, {}) < BIASED


def test_ties_go_to_the_lowest_id(library: ctypes.CDLL) -> None:
    logits = np.zeros((1, 100), np.float32)
    logits[0, [30, 60, 90]] = 4.0
    assert run(library, logits, [{"temperature": 0.0}])["ids"][0] == 30
    assert run(library, logits, [{"top_k": 1}])["ids"][0] == 30
    chosen = {int(run(library, logits, [{"top_k": 2, "seed": s}])["ids"][0]) for s in range(40)}
    assert chosen == {30, 60}
    assert run(library, logits, [{}], num_top=5)["top_ids"][0].tolist() == [30, 60, 90, 0, 1]


@pytest.mark.parametrize("count", [1, 5, 20])
def test_top_logprobs(library: ctypes.CDLL, count: int) -> None:
    logits = random_logits(7, seed=2)
    got = run(library, logits, [{}] * 7, num_top=count)
    for q in range(7):
        ids, logprobs = sampler.top(logits[q], count)
        assert got["top_ids"][q].tolist() == ids.tolist()
        assert np.allclose(got["top_logprobs"][q], logprobs, rtol=2e-7, atol=2e-7)


VOCABS = [1, 2, 15, 16, 17, 1023, 1024, 1025, 49152]
ROWS = ["random", "flat", "ties", "steps", "half -inf", "one finite", "large", "tiny differences"]


def adversarial(kind: str, vocab: int) -> np.ndarray:
    """f32 [V]."""
    rng = np.random.default_rng(vocab)
    x = rng.standard_normal(vocab) * 3
    match kind:
        case "flat":
            x[:] = 0.75
        case "ties":
            x = np.round(x)
        case "steps":  # weights 1, 1/2, 1/4, 1/8 as far as floats have them, each many times
            x = -np.log(2.0) * rng.integers(0, 4, vocab)
        case "half -inf":
            x[rng.permutation(vocab)[: vocab // 2]] = -np.inf
        case "one finite":
            x[:] = -np.inf
            x[vocab // 2] = -5.0
        case "large":
            x *= 1e6
        case "tiny differences":
            x = 20 + rng.integers(0, 3, vocab) * 2.0**-19
        case _:
            pass
    return x.astype(np.float32)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", ROWS)
def test_the_token_is_the_definitions_on_odd_rows(library: ctypes.CDLL, kind: str, vocab: int) -> None:
    row = adversarial(kind, vocab)
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 1e-5},
        {"temperature": 1e6},
        {"min_p": 0.3},
        {"temperature": 0.8, "top_p": float(np.float32(0.95))},
        {"temperature": 2.0, "top_p": float(np.float32(0.9999))},
        {"top_p": float(np.float32(1e-9))},
        {"top_k": 1},
        {"top_k": vocab},
        {"top_k": min(vocab, 900), "top_p": 0.625, "temperature": 0.5},
    ]
    settings = [
        {**s, "seed": 7 * i + (3 << 33), "position": i, "sample_index": i % 2} for i, s in enumerate(settings)
    ]
    got = run(library, np.tile(row, (len(settings), 1)), settings)
    want = [sampler.sample(row, **{"temperature": 1.0, **s}) for s in settings]
    assert got["error"] == 0 and got["ids"].tolist() == want
    logprobs = sampler.log_softmax(row)[want]
    assert np.allclose(got["logprobs"], logprobs, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("vocab", [16, 64, 2048])
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
def test_top_p_reached_exactly_keeps_no_more(library: ctypes.CDLL, vocab: int, share: float) -> None:
    """Equal probabilities, 1 / V, which doubles add without rounding: the first share * V ids are kept."""
    seeds = [{"top_p": share, "seed": s} for s in range(150)]
    chosen = run(library, np.full((150, vocab), 3.0), seeds)["ids"]
    assert chosen.max() < share * vocab
    assert vocab > 16 or set(chosen.tolist()) == set(range(int(share * vocab)))


@pytest.mark.parametrize("row", range(8))
@pytest.mark.parametrize("ulps", [-1, 1])
def test_many_light_tokens_count_closely_at_the_edge_of_the_nucleus(
    library: ctypes.CDLL, row: int, ulps: int
) -> None:
    """top_p is the probability of the likeliest token, a float's step below or above it."""
    rng, temperature = np.random.default_rng(row), np.float32(0.7)
    logits = np.full(VOCAB, rng.uniform(-6.3, -6.0), np.float32)
    logits[:2] = 0.1, 0.0
    share = np.exp(sampler.log_softmax(logits / np.float64(temperature)))[0]
    top_p = np.nextafter(np.float32(share), np.float32(0.5 + ulps))
    keeps = sampler.kept(logits, float(temperature), top_p=float(top_p))
    settings = [{"temperature": temperature, "top_p": top_p, "seed": seed} for seed in range(60)]
    chosen = run(library, np.tile(logits, (60, 1)), settings)["ids"]
    assert set(chosen.tolist()) == set(np.flatnonzero(keeps).tolist())


def test_logprobs_may_be_left_out(library: ctypes.CDLL) -> None:
    logits = random_logits(len(SETTINGS))
    settings = [{**s, "seed": i} for i, s in enumerate(SETTINGS)]
    with_them, without = (run(library, logits, settings, logprobs=wanted) for wanted in (True, False))
    assert without["ids"].tolist() == with_them["ids"].tolist()
    assert np.isnan(without["logprobs"]).all()


def test_a_row_does_not_depend_on_the_others_or_on_threads(library: ctypes.CDLL) -> None:
    logits = random_logits(23, seed=3)
    settings = [{**SETTINGS[i % len(SETTINGS)], "seed": i, "position": i} for i in range(23)]
    together = run(library, logits, settings, num_top=3, threads=3)
    for q in range(23):
        alone = run(library, logits[q : q + 1], settings[q : q + 1], num_top=3, threads=1)
        for name in ("ids", "logprobs", "top_ids", "top_logprobs"):
            assert np.array_equal(alone[name][0], together[name][q])


def test_biased_out_tokens_are_never_chosen(library: ctypes.CDLL) -> None:
    logits = np.full((50, 99), -np.inf, np.float32)
    logits[:, [7, 42]] = 1.0
    got = run(library, logits, [{"seed": s} for s in range(50)])
    assert set(got["ids"].tolist()) == {7, 42}


@pytest.mark.parametrize(
    ("value", "step"), [(np.nan, 3), (np.nan, VOCAB), (np.inf, 7), (np.inf, VOCAB), (-np.inf, 1)]
)
def test_a_row_without_an_order_is_reported_and_left_alone(
    library: ctypes.CDLL, value: float, step: int
) -> None:
    """A sort by logits that have no order could leave the array."""
    logits = random_logits(2)
    logits[1, ::step] = value
    got = run(library, logits, [{"top_k": 40}] * 2, num_top=20)
    assert got["error"] == 2
    assert got["ids"][0] >= 0 and got["ids"][1] == -9 and (got["top_ids"][1] == -9).all()


def test_too_many_threads_are_an_error(library: ctypes.CDLL) -> None:
    """A pool that gets some of its threads ends those and throws."""
    child = os.fork()
    if child == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)  # some tens of stacks
        os._exit(library.opens_pool(100_000))
    assert os.waitpid(child, 0)[1] == 0


def test_scores(library: ctypes.CDLL) -> None:
    logits, ids = random_logits(9, seed=4), np.arange(9, dtype=np.int32) * 500
    out = np.full(9, np.nan, np.float32)
    library.score(
        *(ctypes.c_void_p(pointer(logits)), ctypes.c_int64(9), ctypes.c_int64(VOCAB)),
        *(ctypes.c_void_p(pointer(a)) for a in (ids, out)),
    )
    assert np.allclose(out, sampler.log_softmax(logits)[np.arange(9), ids], rtol=2e-7, atol=2e-7)
