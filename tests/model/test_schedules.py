"""Every schedule of a small compiled model with full and sliding groups gives, bit by bit, what a request
gives that has an engine of one thread and ample memory for itself. So does one that has all formats of the KV
cache, and int4 weights."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test

import compiler
import runtime
from compiler import forward
from passes.base import Pass
from passes.quantize_activations import QuantizeActivations
from passes.quantize_kv import QuantizeKv
from passes.quantize_weights import QuantizeWeights
from runtime import Engine, Sampling
from runtime.artifact import Artifact
from runtime.manifest import KVGroup
from tests.examples import examples, happened
from tests.model import tiny
from tests.model.conftest import best_level
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


def compile_plain(folder: Path) -> Path:
    source = tiny.save("gemma2", folder / "checkpoint")
    options = dict(max_context=tiny.CONTEXT, block=BLOCK, isa=[best_level("f32")])
    return compiler.compile(source, folder / "m.octavo", **options)


def compile_quantized(folder: Path) -> Path:
    """A model of one layer for each format, and of matrices in 4 bits."""
    real = forward.pipeline
    chosen: dict[type[Pass], Pass] = {
        QuantizeKv: QuantizeKv(groups=tuple(FORMATS.values())),
        QuantizeWeights: QuantizeWeights("u4"),
        QuantizeActivations: QuantizeActivations("i8"),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "pipeline", lambda *a, **k: [chosen.get(type(p), p) for p in real(*a, **k)])
        model = tiny.build_plain(*map(sliding, FORMATS))
        return tiny.compiled(model, folder / "q.octavo", block=WIDE_BLOCK)


def sliding(window: int) -> tiny.Mask:
    def hidden(length: int, device: torch.device) -> torch.Tensor:
        at = torch.arange(length, device=device)
        distance = at[:, None] - at[None, :]
        return (distance < 0) | (distance >= window)

    return hidden


@pytest.fixture(scope="module", params=[compile_plain, compile_quantized], ids=["plain", "quantized"])
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return request.param(tmp_path_factory.mktemp("schedules"))


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
def reference(artifact: Path) -> Iterator[Reference]:
    made = Reference(artifact)
    yield made
    made.close()


options = st.fixed_dictionaries(
    {
        "threads": st.integers(1, 3),
        "kv_blocks": st.integers(6, 24),
        "max_step_tokens": st.sampled_from((1, 5, 17, 64)),
        "max_requests": st.sampled_from((1, 3, 4, 6)),
        "prefix_cache": st.sampled_from((True, True, True, False)),
        "draft": st.sampled_from((None, "lookup", "lookup", "lookup")),
    }
)


class CompiledMachine(EngineMachine):
    def __init__(self, totals: Counter[str], path: Path, reference: Reference) -> None:
        super().__init__(totals, WORDS, reference.samples)
        self.path = path

    @initialize(
        options=options,
        places=st.sampled_from((0, 3, 40, 40)),
        drafts=st.sampled_from(("lookup", "oracle", "oracle", "broken")),
        seed=st.integers(0, 999),
    )
    def start(self, options, places, drafts, seed):
        groups = kv_groups(self.path)
        kv_blocks = options["kv_blocks"] * BLOCK // groups[0].block  # as many tokens
        swap_memory = places * sum(group.block_bytes for group in groups)
        given = options | {"kv_blocks": kv_blocks, "swap_memory": swap_memory}
        self.places = places
        self.begin(stepped(runtime.load, path=self.path, verify="fast", **given))
        self.draft(drafts, seed)
        held = zip(self.core.scheduler.swap.places, groups, strict=True)
        assert all(count >= (min(places, options["max_requests"]) if g.tail else places) for count, g in held)


def kv_groups(path: Path) -> Sequence[KVGroup]:
    return Artifact.open(path, verify="fast").manifest.kv_groups


def test_one_of_each_gives_the_bits_that_a_request_gives_alone(artifact, reference):
    machine = CompiledMachine(Counter(), artifact, reference)
    limits = dict(threads=2, kv_blocks=14, max_step_tokens=16, max_requests=4, prefix_cache=True)
    machine.start(limits | {"draft": "lookup"}, 40, "oracle", 0)
    one_of_each(machine)
    happened(machine.totals, HAPPENS, always=True)


def test_any_schedule_gives_the_bits_that_a_request_gives_alone(artifact, reference, record_property):
    totals: Counter[str] = Counter()
    machine = partial(CompiledMachine, totals, artifact, reference)
    run_state_machine_as_test(machine, settings=examples(20 if "m.octavo" in str(artifact) else 6, steps=30))
    record_property("totals", happened(totals, HAPPENS))


scripts = st.lists(st.tuples(st.integers(0, 2), lengths, samples, st.booleans()), min_size=1, max_size=3)


@pytest.mark.parametrize("artifact", [compile_plain], indirect=True, ids=["plain"])
def test_threads_that_submit_at_once_get_the_same_bits(artifact, reference, record_property):
    totals: Counter[str] = Counter()

    @examples(5)
    @given(options=options, scripts=st.lists(scripts, min_size=2, max_size=4))
    def run(options, scripts):
        swap_memory = 20 * sum(group.block_bytes for group in kv_groups(artifact))
        with runtime.load(artifact, verify="fast", swap_memory=swap_memory, **options) as engine:
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
