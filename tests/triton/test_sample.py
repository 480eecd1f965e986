"""The sampler's kernels under Triton's interpreter against runtime.sampler, the definition in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from codegen import triton
from codegen.cache import Cache
from codegen.triton import sample as printer
from codegen.triton.build import build_kernels
from codegen.triton.devices import Device
from codegen.triton.sample import SampleTile
from runtime import sampler
from runtime.gpu.device import KernelSpec
from runtime.gpu.interpret import InterpretedDevice
from runtime.sampling import MAX_LOGPROBS
from tests.codegen.harness import Array, aligned, arg, lower, paged_builder, weight
from tests.triton.harness import GUARD, Kernels

DEFAULTS: dict[str, float] = {
    "temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "top_k": 0, "seed": 0, "sample_index": 0, "position": 0,
}  # fmt: skip
INTEGERS = {"top_k": np.int32, "seed": np.uint64, "sample_index": np.int32, "position": np.int32}
EDGE = 1e-5  # what f32 may decide otherwise: shares this close to top_p, and noisy scores this close
Setting = dict[str, float]


def generate(vocab: int, target: str = "triton-interpret") -> triton.Generated:
    b, _ = paged_builder()
    graph = b.graph([b.op("embed", arg(b, "ids"), weight("table", 4, vocab))])
    return triton.generate(lower(graph, "gpu"), triton.find_device(target))


class Sampler:
    """Runs sections over rows of logits, each array between guards and full of ones where it is not given."""

    def __init__(self, vocab: int, directory: Path) -> None:
        self.kernels = Kernels(generate(vocab), directory)

    def run(
        self,
        section: str,
        logits: Array,
        settings: Sequence[Setting],
        width: int = 0,
        *,
        logit_rows: Sequence[int] | None = None,
        given: Sequence[int] = (),
    ) -> dict[str, Array]:
        rows = len(settings)
        per_row, fixed = self.kernels.plan.sample_scratch
        inputs = {
            name: np.array([s.get(name, default) for s in settings], INTEGERS.get(name, np.float32))
            for name, default in DEFAULTS.items()
        }
        inputs |= {
            "logits": np.ascontiguousarray(logits, np.float32),
            "logit_rows": np.array(range(rows) if logit_rows is None else logit_rows, np.int32),
            "given_ids": np.array(given, np.int32),
        }
        guarded = {
            "sample_scratch": aligned(per_row * rows + fixed + 2 * GUARD, np.uint8, 255),
            **{n: aligned(4 * rows + 2 * GUARD, np.uint8, 255) for n in ("sampled_ids", "sampled_logprobs")},
            "given_logprobs": aligned(4 * rows + 2 * GUARD, np.uint8, 255),
            **{n: aligned(4 * rows * width + 2 * GUARD, np.uint8, 255) for n in ("top_ids", "top_logprobs")},
        }
        inner = {name: array[GUARD:-GUARD] for name, array in guarded.items()}
        self.kernels.run(section, {"Q": rows, "K": width}, inputs | inner, [])
        for name, array in guarded.items():
            assert (array[:GUARD] == 255).all() and (array[-GUARD:] == 255).all(), f"wrote outside {name}"
        found = {n: a.view(np.int32 if n.endswith("ids") else np.float32) for n, a in inner.items()}
        return found | {n: found[n].reshape(rows, width) for n in ("top_ids", "top_logprobs")}


Make = Callable[..., Sampler]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """A sampler of a vocabulary that is cut into blocks of `block` logits, of 1 where none is given."""

    def made(vocab: int, block: int | None = None, bits: int = 8, group: int = 256) -> Sampler:
        def tile(device: Device, vocab_size: int) -> SampleTile:
            return SampleTile(block or 1 << (vocab_size - 1).bit_length(), bits, group, 1)

        monkeypatch.setattr(printer, "sample_tile", tile)
        return Sampler(vocab, tmp_path)

    return made


def check_token(row: Array, setting: Setting, got: int) -> None:
    """The definition's token, or one that is as good within EDGE."""
    s = {**DEFAULTS, **setting}
    if s["temperature"] == 0:
        assert got == int(np.argmax(row))
        return
    temperature, top_k = float(np.float32(s["temperature"])), int(s["top_k"])
    top_p, min_p = float(np.float32(s["top_p"])), float(np.float32(s["min_p"]))
    loose = sampler.kept(row, temperature, top_k, min(1.0, top_p + EDGE), min_p * (1 - EDGE))
    strict = sampler.kept(row, temperature, top_k, max(0.0, top_p - EDGE * (top_p < 1)), min_p * (1 + EDGE))
    noise = sampler.gumbel(len(row), int(s["seed"]), int(s["position"]), int(s["sample_index"]))
    noisy = (row.astype(np.float64) - row.max()) / temperature + noise
    want = sampler.sample(
        row, **{**s, "temperature": temperature, "top_p": top_p, "min_p": min_p, "top_k": top_k}
    )  # type: ignore[arg-type]
    assert loose[got], f"{got} is not kept; the definition takes {want}"
    assert noisy[got] >= noisy[strict].max(initial=-np.inf) - EDGE, f"{got}, but {want} has more noise"


def random_logits(rows: int, vocab: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * 2.5).astype(np.float32)


def keys(count: int) -> list[Setting]:
    return [
        {"seed": (11 * i << 40) + 2**63 + i, "sample_index": i % 3, "position": 5 * i} for i in range(count)
    ]


# --- noise

NOISE_KERNEL = """

@triton.jit
def noise(seed, ids, words, noise_of_words, out, position, sample_index, N: tl.constexpr):
    i = tl.arange(0, N)
    id = tl.load(ids + i).to(tl.uint32)
    none = id ^ id
    tl.store(out + i, gumbel(tl.load(noise_of_words + i)))
    tl.store(words + i, philox(tl.load(seed), id, none + position, none + sample_index))
"""


def test_noise_is_the_definitions(tmp_path: Path) -> None:
    source = tmp_path / "noise.py"
    source.write_text(generate(37).source + NOISE_KERNEL)
    device = InterpretedDevice(source)
    signature = (("seed", "*u64"), ("ids", "*i32"), ("words", "*u32"), ("noise_of_words", "*u32"))
    signature += (("out", "*fp32"), ("position", "i32"), ("sample_index", "i32"))
    (kernel,) = device.load([KernelSpec("noise", "noise", "noise", signature, (("N", 1024),), 1, 0, None)])
    ids = np.random.default_rng(0).integers(0, 2**31, 1024).astype(np.int32)
    ids[:3] = 0, 1, 2**31 - 1
    edges = np.array([0, 1, 2, 2**23 - 1, 2**23, 2**23 + 1, 2**24 - 2, 2**24 - 1], np.uint32) << 8
    given = np.concatenate([edges, np.random.default_rng(1).integers(0, 2**32, 1016).astype(np.uint32)])
    uniform = ((given >> 8).astype(np.float64) + 0.5) * 2.0**-24
    for seed in (0, 1, 0xDEADBEEF12345678, 2**64 - 1):
        words, out = np.zeros(1024, np.uint32), np.full(1024, np.nan, np.float32)
        arrays = np.array([seed], np.uint64), ids, words, given, out
        device.launch(kernel, (1, 1, 1), [*(a.ctypes.data for a in arrays), 77, 3])
        counter = np.zeros((1024, 4), np.uint64)
        counter[:, 0], counter[:, 1], counter[:, 2] = ids, 77, 3
        assert words.tolist() == sampler.philox(counter, seed)[:, 0].tolist()
        np.testing.assert_allclose(out, -np.log(-np.log(uniform)), rtol=3e-7, atol=3e-7)


# --- tokens

FILTERS: list[Setting] = [
    {"temperature": 0.7, "top_k": 1},
    {"temperature": 0.7, "top_k": 40},
    {"temperature": 1.3, "top_k": 1005},
    {"temperature": 0.9, "top_p": 0.3},
    {"temperature": 1.5, "top_p": 0.9999},
    {"temperature": 1.0, "top_p": 0.95, "min_p": 0.05},
    {"temperature": 1.1, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 1.6, "top_k": 999, "top_p": 0.7},
    {"temperature": 0.5, "top_p": 1e-6},
    {"temperature": 0.0, "top_k": 5},
]


def test_filtered_tokens_are_the_definitions(make: Make) -> None:
    rows = [{**s, **k} for s, k in zip(FILTERS, keys(len(FILTERS)), strict=True)]
    logits = random_logits(len(rows), 1000)
    got = make(1000, block=512).run("sample", logits, rows)
    for q, setting in enumerate(rows):
        check_token(logits[q], setting, int(got["sampled_ids"][q]))
    logprobs = sampler.log_softmax(logits)[np.arange(len(rows)), got["sampled_ids"]]
    np.testing.assert_allclose(got["sampled_logprobs"], logprobs, rtol=1e-6, atol=1e-6)


def telling_seeds(row: Array, setting: Setting) -> list[int]:
    """Seeds with which the last token that is kept has the most noise, and the first that is not."""
    noisiest: dict[int, int] = {}
    kept = sampler.kept(row, setting["temperature"], int(setting.get("top_k", 0)), setting.get("top_p", 1.0))
    order, count = np.argsort(-row.astype(np.float64), kind="stable"), int(kept.sum())
    for seed in range(4000):
        noisy = row / setting["temperature"] + sampler.gumbel(len(row), seed, 0, 0)
        noisiest.setdefault(int(np.argmax(noisy[order[: count + 1]])), seed)
    return [noisiest[count - 1], noisiest[count]]


@pytest.mark.parametrize("setting", [{"top_k": 10}, {"top_p": 0.625}, {"top_k": 20, "top_p": 0.75}], ids=str)
def test_no_token_more_and_none_less_is_kept(make: Make, setting: Setting) -> None:
    """Logits of few values, so that many are equal, over three splits."""
    row = np.round(random_logits(1, 150, seed=8)[0] * 4) / 4
    rows: list[Setting] = [
        {**setting, "temperature": 2.0, "seed": seed}
        for seed in telling_seeds(row, {**setting, "temperature": 2.0})
    ]
    got = make(150, block=64).run("sample", np.stack([row, row]), rows)["sampled_ids"].tolist()
    assert got == [sampler.sample(row, **s) for s in rows]  # type: ignore[arg-type]


def test_a_search_in_steps_of_four_bits_over_many_splits(make: Make) -> None:
    """The tile that devices have, but for its block. The logits are integers: many are equal."""
    rows = [{"temperature": 0.8, "top_k": 60, "top_p": 0.9, "seed": 3}, {"top_p": 0.9, "seed": 2**64 - 1}]
    logits = np.round(random_logits(2, 4099, seed=5))
    got = make(4099, block=2048, bits=4, group=4).run("sample", logits, rows)
    for q, setting in enumerate(rows):
        check_token(logits[q], setting, int(got["sampled_ids"][q]))


def adversarial(kind: str, vocab: int) -> Array:
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
        case _:  # both zeros among few values
            x = rng.choice([0.0, -0.0, 1.0, -1.0], vocab)
    return x.astype(np.float32)


KINDS = ["flat", "ties", "steps", "half -inf", "one finite", "large", "tiny differences", "zeros"]
ODD: list[Setting] = [
    {"temperature": 1e-5, "top_p": 0.5},
    {"temperature": 1e6, "top_k": 20},
    {"temperature": 0.8, "top_k": 30, "top_p": 0.625, "min_p": 0.3},
]


@pytest.mark.parametrize("setting", ODD, ids=str)
def test_tokens_are_the_definitions_on_odd_rows(make: Make, setting: Setting) -> None:
    logits = np.stack([adversarial(kind, 37) for kind in KINDS])
    rows = [{**setting, **key} for key in keys(len(KINDS))]
    got = make(37).run("sample", logits, rows)
    for q in range(len(KINDS)):
        check_token(logits[q], rows[q], int(got["sampled_ids"][q]))


@pytest.mark.parametrize("vocab", [1, 37, 4099])
def test_unfiltered_and_greedy_tokens_are_the_definitions(make: Make, vocab: int) -> None:
    settings = [{}, {"temperature": 0.0}, {"temperature": 1e-5}, {"temperature": 1e6}, {"min_p": 0.3}]
    rows = [{**s, **k} for s, k in zip(settings, keys(5), strict=True)]
    logits = np.stack([adversarial(kind, vocab) for kind in KINDS[1:6]])
    made = make(vocab, block=max(16, 1 << (vocab // 3).bit_length()))
    got = made.run("sample_unfiltered", logits, rows)
    for q in range(5):
        check_token(logits[q], rows[q], int(got["sampled_ids"][q]))
    logprobs = sampler.log_softmax(logits)[np.arange(5), got["sampled_ids"]]
    np.testing.assert_allclose(got["sampled_logprobs"], logprobs, rtol=1e-6, atol=1e-6)
    greedy = made.run("sample_greedy", logits, [{}] * 5)
    assert greedy["sampled_ids"].tolist() == np.argmax(logits, axis=-1).tolist()


def test_ties_go_to_the_lowest_id_across_splits(make: Make) -> None:
    logits = np.zeros((5, 100), np.float32)
    logits[:, [30, 70, 90]] = 4.0
    made = make(100, block=64)
    got = made.run("sample", logits, [{"top_k": 2, "seed": s} for s in range(5)])["sampled_ids"].tolist()
    assert got == [sampler.sample(logits[0], temperature=1.0, top_k=2, seed=s) for s in range(5)]
    assert set(got) == {30, 70}, "seeds that would not show a tie broken otherwise"
    assert made.run("sample_greedy", logits[:1], [{}])["sampled_ids"][0] == 30


@pytest.mark.parametrize("share", [0.25, 0.75])
def test_top_p_reached_exactly_keeps_no_more(make: Make, share: float) -> None:
    """Equal probabilities, 1 / V: the first share * V ids are kept. The next one has the most noise."""
    logits = np.full((4, 64), 3.0, np.float32)
    one_more = {"temperature": 1.0, "top_p": share + 1 / 64}
    seeds = [s for s in range(1000) if sampler.sample(logits[0], **one_more, seed=s) == share * 64][:4]  # type: ignore[arg-type]
    rows: list[Setting] = [{"top_p": share, "seed": s} for s in seeds]
    got = make(64).run("sample", logits, rows)["sampled_ids"].tolist()
    assert got == [sampler.sample(logits[0], temperature=1.0, top_p=share, seed=s) for s in seeds]


def test_one_search_is_enough_for_one_filter(make: Make) -> None:
    settings: list[Setting] = [
        {"top_p": 0.6},
        {"top_k": 7, "min_p": 0.1},
        {"temperature": 0.0, "top_k": 3},
        {},
    ]
    rows, logits = [{**s, **k} for s, k in zip(settings, keys(4), strict=True)], random_logits(4, 100, seed=6)
    made = make(
        100, block=64, bits=11
    )  # three passes: the last of one search writes where that of two does not
    got = {
        name: made.run(name, logits, rows)["sampled_ids"].tolist() for name in ("sample_one_filter", "sample")
    }
    assert got["sample_one_filter"] == got["sample"]
    for q in range(4):
        check_token(logits[q], rows[q], got["sample"][q])


def test_rows_are_read_where_they_lie_and_do_not_depend_on_others(make: Make) -> None:
    logits, made = random_logits(4, 37, seed=3), make(37)
    rows = [{**FILTERS[i], "seed": i} for i in (6, 3, 9)]
    together = made.run("sample", logits, rows, logit_rows=[3, 0, 3])
    for q, row in enumerate((3, 0, 3)):
        check_token(logits[row], rows[q], int(together["sampled_ids"][q]))
    alone = made.run("sample", logits[:1], rows[1:2])
    for name in ("sampled_ids", "sampled_logprobs"):
        assert alone[name][0] == together[name][1]


SECTIONS = ["sample_greedy", "sample_unfiltered", "sample_one_filter", "sample", "top", "logprobs"]
BROKEN = [(np.nan, 3), (np.inf, 7), (-np.inf, 1)]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_row_without_an_order_has_no_token(make: Make, section: str) -> None:
    logits = random_logits(4, 37)
    for row, (value, step) in enumerate(BROKEN):
        logits[row, ::step] = value
    got = make(37).run(section, logits, [{"top_k": 4, "top_p": 0.5}] * 4, width=3, given=[1, 2, 3, 4])
    if section.startswith("sample"):
        assert (got["sampled_ids"][:3] == -1).all() and got["sampled_ids"][3] >= 0
    if section in ("sample", "sample_one_filter", "sample_unfiltered"):
        assert np.isnan(got["sampled_logprobs"]).tolist() == [True, True, True, False]
    if section == "top":
        assert (got["top_ids"][:3] == -1).all() and np.isnan(got["top_logprobs"][:3]).all()
        assert got["top_ids"][3].tolist() == sampler.top(logits[3], 3)[0].tolist()
    if section == "logprobs":
        assert np.isnan(got["given_logprobs"]).tolist() == [True, True, True, False]


# --- log-probabilities


@pytest.mark.parametrize(
    ("vocab", "block", "width"), [(37, 16, 1), (100, 64, 45), (37, 64, 40), (1000, 512, 1000)]
)
def test_the_likeliest_are_the_definitions(make: Make, vocab: int, block: int, width: int) -> None:
    kinds = ["ties", "half -inf", "zeros", "tiny differences"]
    logits = np.stack([random_logits(1, vocab, seed=2)[0], *(adversarial(kind, vocab) for kind in kinds)])
    got = make(vocab, block).run("top", logits, [{}] * 5, width)
    for q in range(5):
        ids, logprobs = sampler.top(logits[q], width)
        beyond = width - len(ids)
        assert got["top_ids"][q].tolist() == ids.tolist() + [-1] * beyond
        want = np.concatenate([logprobs, np.full(beyond, -np.inf)])
        np.testing.assert_allclose(got["top_logprobs"][q], want, rtol=1e-6, atol=1e-6)


def test_the_api_asks_for_no_more_than_are_sorted() -> None:
    assert printer.MAX_TOP >= MAX_LOGPROBS


def test_scores(make: Make) -> None:
    logits, ids = random_logits(6, 1000, seed=4), [0, 255, 256, 999, 1000, -1]
    got = make(1000, block=256).run("logprobs", logits, [{}] * 6, given=ids)["given_logprobs"]
    np.testing.assert_allclose(
        got[:4], sampler.log_softmax(logits)[np.arange(4), ids[:4]], rtol=1e-6, atol=1e-6
    )
    assert np.isnan(got[4:]).all(), "ids outside the vocabulary"


# --- binaries

# Each kernel with the most registers on each vendor; on NVIDIA's, whose registers are as many, one a device.
LARGEST = [
    ("cuda:sm_80", {"sample_again"}),
    ("cuda:sm_90", {"sample_noise_kept"}),
    ("cuda:sm_100", {"sample_again"}),
    ("hip:gfx942", {"sample_again", "sample_noise_kept"}),
]


@pytest.mark.parametrize(("target", "largest"), LARGEST, ids=[target for target, _ in LARGEST])
def test_kernels_fit_registers_at_a_large_vocabulary(tmp_path: Path, target: str, largest: set[str]) -> None:
    generated = generate(128256, target)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels/kernels.py").write_text(generated.source)
    kernels = [k for k in generated.kernels if k.function in largest]
    built = build_kernels(tmp_path, kernels, generated.device, cache=Cache(tmp_path / "cache"))
    assert {k.kernel.function for k in built} == largest
    assert all(k.spills == 0 for k in built)
