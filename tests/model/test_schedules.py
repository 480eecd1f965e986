"""Every schedule of a small compiled model with full and sliding groups gives, bit by bit, what a request
gives that has an engine of one thread and ample memory for itself. So do one that has all formats of the KV
cache, and int4 weights, and one that has recurrences. Their drafts are made by lookup, by one of their own
on their KV blocks, by that as an artifact of its own, or by one who knows."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from torch import nn

import compiler
import runtime
from compiler import forward
from compiler.importers import Imported
from compiler.quantization import decide
from compiler.quantization.draft import DraftQuantizer
from compiler.weights import ArraySource
from passes.base import Pass
from passes.quantize_activations import QuantizeActivations
from passes.quantize_kv import QuantizeKv
from passes.quantize_weights import QuantizeWeights
from runtime import Engine, Sampling
from runtime.artifact import Artifact
from runtime.manifest import KVGroup
from runtime.speculation.engine import EngineDrafter
from tests.examples import examples, happened
from tests.model import tiny
from tests.model.conftest import best_level
from tests.runtime import made
from tests.runtime.schedules import (
    HAPPENS,
    Alone,
    EngineMachine,
    lengths,
    one_of_each,
    prompts,
    samples,
    stepped,
)

WORDS = prompts(tiny.VOCAB, tiny.CONTEXT)
BLOCK = 8
FORMATS = {5: "int8", 20: "int2", 12: "fp8", tiny.CONTEXT: "int4"}  # by the window of a layer
WIDE_BLOCK = 16  # that codes of 2 and 4 bits fill


DRAFT = dict(draft="self:int4", algorithm="rtn")
OFF = 0.3  # of a matrix's spread, that its draft's differs by


def compile_plain(folder: Path) -> Path:
    source = tiny.save("gemma2", folder / "checkpoint")
    options = dict(max_context=tiny.CONTEXT, block=BLOCK, isa=[best_level("f32")], **DRAFT)
    with passes({QuantizeWeights: QuantizeWeights(), QuantizeActivations: QuantizeActivations()}):
        return compiler.compile(source, folder / "m.octavo", **options)


def compile_quantized(folder: Path) -> Path:
    """A model of one layer for each format, and of matrices in 4 bits."""
    chosen: dict[type[Pass], Pass] = {
        QuantizeKv: QuantizeKv(groups=tuple(FORMATS.values())),
        QuantizeWeights: QuantizeWeights("u4"),
        QuantizeActivations: QuantizeActivations("i8"),
    }
    model = tiny.build_plain(*map(sliding, FORMATS))
    with passes(chosen):
        return tiny.compiled(model, folder / "q.octavo", block=WIDE_BLOCK, **DRAFT)


class Recurrent(nn.Module):
    """Linear attention with gates, a running mean, and each token beside the one before it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, hidden // heads
        self.qkv, self.gates = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, heads)
        self.shift = nn.Parameter(torch.randn(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, S, hidden]
        batch, length, hidden = x.shape
        x = x + self.shift * torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        q, k, v = (
            part.view(batch, length, self.heads, self.size).transpose(1, 2)
            for part in self.qkv(x).split(hidden, dim=-1)
        )
        total = nn.functional.logsigmoid(self.gates(x)).transpose(1, 2).cumsum(-1)  # [B, heads, S]
        decay = (total[..., :, None] - total[..., None, :]).exp()
        y = ((q @ k.transpose(-2, -1) * decay).tril() @ v).transpose(1, 2).reshape(batch, length, hidden)
        count = torch.arange(1, length + 1, device=x.device)[:, None]
        return x + 0.2 * y + x.cumsum(1) / count


def compile_recurrent(folder: Path) -> Path:
    model = tiny.build_plain(sliding(12), tiny.causal, mix=Recurrent(96, 3))
    with passes({QuantizeWeights: QuantizeWeights(), QuantizeActivations: QuantizeActivations()}):
        return tiny.compiled(model, folder / "r.octavo", block=BLOCK, **DRAFT)


@contextmanager
def passes(chosen: Mapping[type[Pass], Pass]) -> Iterator[None]:
    """Compiles have these passes, and drafts the same on other weights: as graphs they are equal, and
    kernels are built once for both."""
    real = forward.pipeline
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "pipeline", lambda *a, **k: [chosen.get(type(p), p) for p in real(*a, **k)])
        patch.setattr(decide, "HELD_OUT_TOKENS", 64)
        patch.setattr(DraftQuantizer, "imported", like)
        yield


def like(quantizer: DraftQuantizer) -> Imported:
    """The model, with matrices that are a little off."""
    rng, source = np.random.default_rng(0), quantizer._imported.weights
    arrays = {name: source.read(name) for name in source.names}
    for name, array in arrays.items():
        if array.ndim > 1:
            noise = rng.normal(size=array.shape, scale=OFF * array.std())
            arrays[name] = array + noise.astype(array.dtype)
    return replace(quantizer._imported, weights=ArraySource(arrays))


def save_draft(artifact: Path, out: Path) -> Path:
    """An artifact's draft, as an artifact of its own."""
    shutil.copytree(artifact, out)
    raw = json.loads((out / "manifest.json").read_text())
    draft = raw["targets"]["cpu"].pop("draft")
    raw["targets"]["cpu"] = {name: draft[name] for name in raw["targets"]["cpu"]}
    (out / "manifest.json").write_text(json.dumps(made.sign(raw)))
    return out


def sliding(window: int) -> tiny.Mask:
    def hidden(length: int, device: torch.device) -> torch.Tensor:
        at = torch.arange(length, device=device)
        distance = at[:, None] - at[None, :]
        return (distance < 0) | (distance >= window)

    return hidden


@dataclass(frozen=True)
class Made:
    """drafter: its own draft as another artifact."""

    path: Path
    drafter: Path

    def draft(self, name: str | None) -> str | Path | None:
        """What load is given: name, or the path for "engine"."""
        return self.drafter if name == "engine" else name


COMPILES = {"plain": compile_plain, "quantized": compile_quantized, "recurrent": compile_recurrent}


@pytest.fixture(scope="module", params=COMPILES.values(), ids=COMPILES)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("schedules")
    path = request.param(folder)
    return Made(path, save_draft(path, folder / "draft.octavo"))


class Reference:
    """One thread, no prefix cache, ample memory, one request at a time; what it said is kept."""

    def __init__(self, path: Path) -> None:
        self._engine = runtime.load(path, threads=1, prefix_cache=False)
        self._kept: dict[tuple[tuple[int, ...], Sampling], list[Alone]] = {}

    def samples(self, prompt: tuple[int, ...], sampling: Sampling) -> list[Alone]:
        key = prompt, replace(sampling, draft_tokens=None)
        if key not in self._kept:
            request = self._engine.submit(list(prompt), sampling)
            self._kept[key] = [Alone.of(completion) for completion in request.results(timeout_s=60)]
        return self._kept[key]

    def close(self) -> None:
        self._engine.close()


@pytest.fixture(scope="module")
def reference(artifact: Made) -> Iterator[Reference]:
    reference = Reference(artifact.path)
    yield reference
    reference.close()


DRAFTERS = ("lookup", "self", "engine")
options = st.fixed_dictionaries(
    {
        "threads": st.integers(1, 3),
        "kv_blocks": st.integers(6, 24),
        "max_step_tokens": st.sampled_from((1, 5, 17, 64)),
        "max_requests": st.sampled_from((1, 3, 4, 6)),
        "prefix_cache": st.sampled_from((True, True, True, False)),
        "draft": st.sampled_from((*DRAFTERS[::-1], None)),
    }
)


class CompiledMachine(EngineMachine):
    def __init__(self, totals: Counter[str], artifact: Made, reference: Reference) -> None:
        super().__init__(totals, WORDS, reference.samples)
        self.artifact, self.draws = artifact, ""

    @initialize(
        options=options,
        places=st.sampled_from((0, 3, 40, 40)),
        drafts=st.sampled_from(("own", "own", "own", "oracle", "broken")),
        seed=st.integers(0, 999),
    )
    def start(self, options, places, drafts, seed):
        path, groups = self.artifact.path, kv_groups(self.artifact.path)
        kv_blocks = options["kv_blocks"] * BLOCK // groups[0].block  # as many tokens
        swap_memory = places * sum(group.block_bytes for group in groups)
        given = options | {"kv_blocks": kv_blocks, "swap_memory": swap_memory}
        given["draft"] = self.artifact.draft(options["draft"])
        self.places = places
        self.begin(stepped(runtime.load, path=path, verify="fast", **given))
        self.draft(drafts, seed)
        self.draws = options["draft"] if drafts == "own" and options["draft"] else ""
        held = zip(self.core.scheduler.swap.places, groups, strict=True)
        single = min(places, options["max_requests"])  # of a group in which most requests have one block
        assert all(count >= (single if g.tail or g.state else places) for count, g in held)

    def finish(self):
        super().finish()
        if not self.draws:
            return
        speculation, stats = self.core.speculation, self.engine.stats()
        assert not speculation.failures, stats.draft_stopped or self.core.log.since()
        if isinstance(speculation.drafter, EngineDrafter):
            speculation.drafter.check()
            assert not speculation.drafter.shadows
        self.totals[f"{self.draws} right"] += stats.accepted_tokens
        self.totals[f"{self.draws} wrong"] += stats.drafted_tokens - stats.accepted_tokens


def kv_groups(path: Path) -> Sequence[KVGroup]:
    return Artifact.open(path, verify="fast").manifest.kv_groups


@pytest.mark.parametrize(("draft", "drafts"), [("lookup", "oracle"), ("self", "own"), ("engine", "own")])
def test_one_of_each_gives_the_bits_that_a_request_gives_alone(artifact, reference, draft, drafts):
    machine = CompiledMachine(Counter(), artifact, reference)
    limits = dict(threads=2, kv_blocks=14, max_step_tokens=16, max_requests=4, prefix_cache=True)
    machine.start(limits | {"draft": draft}, 40, drafts, 0)
    one_of_each(machine)
    wanted = HAPPENS if draft != "engine" else ("accepted", "rejected")
    if artifact.path.name == "r.octavo":  # what it swaps out ends before there is room for it
        wanted = [name for name in wanted if name != "swap_in"]
    happened(machine.totals, wanted, always=True)


def test_any_schedule_gives_the_bits_that_a_request_gives_alone(artifact, reference, record_property):
    totals: Counter[str] = Counter()
    machine = partial(CompiledMachine, totals, artifact, reference)
    run_state_machine_as_test(
        machine, settings=examples(20 if artifact.path.name == "m.octavo" else 6, steps=30)
    )
    kinds = tuple(f"{name} {found}" for name in DRAFTERS for found in ("right", "wrong"))
    record_property("totals", happened(totals, (*HAPPENS, *kinds)))


MODES = (
    dict(temperature=0.0),
    dict(temperature=0.7, top_p=0.9),
    dict(temperature=1.0, top_p=0.95),
    dict(temperature=1.0, n=2, repetition_penalty=1.2, presence_penalty=0.3),
)


@pytest.mark.parametrize("draft", DRAFTERS)
def test_random_requests_get_the_same_bits_with_drafts(artifact, reference, draft):
    """Each alone, and all beside one another, of which some have no drafts."""
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)  # which pytest shows where it fails
    rng = np.random.default_rng(seed)
    count = int(os.environ.get("OCTAVO_EXAMPLES", 24 if artifact.path.name == "m.octavo" else 8))
    asked = [random_request(rng, MODES[i % len(MODES)]) for i in range(count)]
    expected = [reference.samples(tuple(prompt), sampling) for prompt, sampling in asked]
    options = dict(threads=1, verify="fast", kv_blocks=60 * BLOCK // kv_groups(artifact.path)[0].block)
    for together in (False, True):
        with runtime.load(artifact.path, draft=artifact.draft(draft), **options) as engine:
            requests = []
            for prompt, sampling in asked:
                drafts = rng.choice([None, None, 0, 3, 8]) if together else rng.choice([None, 2, 5])
                requests.append(engine.submit(prompt, replace(sampling, draft_tokens=drafts)))
                _ = together or requests[-1].results(timeout_s=60)
            for request, alone in zip(requests, expected, strict=True):
                assert [Alone.of(c) for c in request.results(timeout_s=60)] == alone
            stats = engine.stats()
            assert stats.draft_failures == 0 < stats.drafted_tokens
            repeats = draft != "lookup" or artifact.path.name != "r.octavo"  # which says nothing twice
            assert not repeats or 0 < stats.accepted_tokens < stats.drafted_tokens


def random_request(rng: np.random.Generator, mode: dict[str, Any]) -> tuple[list[int], Sampling]:
    """Half of the prompts say a part of themselves again."""
    prompt = rng.integers(3, tiny.VOCAB, rng.integers(1, 50)).tolist()
    prompt += prompt[: len(prompt) * int(rng.integers(2))][:30]
    more = dict(max_new_tokens=int(rng.integers(1, 40)), seed=int(rng.integers(2**40)))
    return prompt, Sampling(logprobs=int(rng.integers(3)), ignore_eos=bool(rng.integers(2)), **more, **mode)


def test_requests_that_come_back_from_the_host_go_on_with_the_same_bits(artifact, reference):
    """More than fit, which all grow to half the context, by greedy choice and in samples."""
    rng, groups = np.random.default_rng(0), kv_groups(artifact.path)
    asked = [rng.integers(3, tiny.VOCAB, n).tolist() for n in (20, 30, 40, 25, 35, 17)]
    samplings = [
        Sampling(max_new_tokens=40, ignore_eos=True, logprobs=1, temperature=t, seed=1) for t in (0, 1)
    ]
    limits = dict(kv_blocks=20 * BLOCK // groups[0].block, prefix_cache=False, verify="fast")
    with runtime.load(
        artifact.path, swap_memory=99 * sum(group.block_bytes for group in groups), **limits
    ) as engine:
        for sampling in samplings:
            requests = [engine.submit(prompt, sampling) for prompt in asked]
            for request, prompt in zip(requests, asked, strict=True):
                found = [Alone.of(completion) for completion in request.results(timeout_s=60)]
                assert found == reference.samples(tuple(prompt), sampling)
        kinds = {entry.kind for entry in engine.log()}
        assert {"preempt", "swap_out", "swap_in"} <= kinds


scripts = st.lists(st.tuples(st.integers(0, 2), lengths, samples, st.booleans()), min_size=1, max_size=3)


@pytest.mark.parametrize("artifact", [compile_plain], indirect=True, ids=["plain"])
def test_threads_that_submit_at_once_get_the_same_bits(artifact, reference, record_property):
    totals: Counter[str] = Counter()

    @examples(5)
    @given(options=options, scripts=st.lists(scripts, min_size=2, max_size=4))
    def run(options, scripts):
        swap_memory = 20 * sum(group.block_bytes for group in kv_groups(artifact.path))
        given = options | {"draft": artifact.draft(options["draft"]), "swap_memory": swap_memory}
        with runtime.load(artifact.path, verify="fast", **given) as engine:
            errors: list[BaseException] = []
            threads = [threading.Thread(target=client, args=(engine, s, reference, errors)) for s in scripts]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors
            assert engine.stats().blocks_used == [0] * len(engine.stats().blocks_total)
            totals.update(engine._core.log.events)

    run()
    record_property("totals", happened(totals, ()))


def client(engine: Engine, script, reference: Reference, errors: list[BaseException]) -> None:
    """Submits, forks what it gets half-way, and compares."""
    try:
        for word, length, sampling, forks in script:
            prompt = WORDS[word][:length]
            try:
                request = engine.submit(prompt, sampling)
                others = [request.fork(Sampling(5, seed=0), append=WORDS[1][:3])] if forks else []
            except runtime.RequestError:
                continue
            for made in (request, *others):
                completions = made.results(timeout_s=120)
                alone = reference.samples(tuple(completions[0].prompt_token_ids), made.sampling)
                assert [Alone.of(completion) for completion in completions] == alone
    except BaseException as error:
        errors.append(error)
