"""A made artifact through the C ABI: its stub library holds a model like that of tests/runtime/fake.py,
so that a wrong slot, a wrong structure or a wrong pool gives other tokens.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest

import runtime
from compiler.trial import open_executor
from runtime import ArtifactError, EngineError, ResourceError, Sampling, machine
from runtime.artifact import Artifact
from runtime.cpu.executor import CpuExecutor
from runtime.cpu.plan import Plan
from runtime.executor import SampleArgs
from runtime.limits import Limits
from runtime.weights import Weights
from tests.runtime import made
from tests.runtime.fake import VOCAB, mix

COMPILER = shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler")
PROMPTS = [np.random.default_rng(n).integers(20, VOCAB, n).tolist() for n in (1, 16, 17, 40, 70)]

OPTIONS = [{}, {"max_step_tokens": 7}, {"kv_blocks": 8}, {"kv_memory": "64KiB"}]


def build(folder: Path, *flags: str) -> bytes:
    out = folder / "stub.so"
    source = Path(__file__).with_name("stub.c")
    command = [COMPILER, "-shared", "-fPIC", "-O1", "-x", "c", source, "-o", out, "-lm", *flags]
    subprocess.run(command, check=True)
    return out.read_bytes()


@pytest.fixture(scope="module")
def artifact(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stub")
    return made.write(folder / "tiny.octavo", made.default_files(build(folder)))


def greedy(prompt: list[int], count: int, penalty: float = 1.0) -> list[int]:
    """The model by its definition, without a cache. penalty: what the logits, which are above 0, of tokens
    that were there are divided by."""
    tokens, keys, seconds = list(prompt), [], []
    while len(tokens) < len(prompt) + count or len(keys) < len(tokens) - 1:
        p = len(keys)
        keys.append(mix(0, tokens[p], p))
        seconds.append(mix(7, tokens[p], *keys))
        if p == len(tokens) - 1:
            state = mix(tokens[p], *keys, *seconds)
            logits = np.array([resume(state, v) >> 40 for v in range(VOCAB)], np.float32)
            logits[tokens] /= np.float32(penalty)
            tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :]


def resume(state: int, word: int) -> int:
    """mix() continued from a state."""
    mask = 2**64 - 1
    h = (state ^ word) * 0xBF58476D1CE4E5B9 & mask
    h ^= h >> 27
    h = h * 0x94D049BB133111EB & mask
    return h ^ (h >> 31)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_tokens_come_through_the_abi(artifact, options):
    expected = [greedy(p, 12) for p in PROMPTS]
    with runtime.load(artifact, threads=1, **options) as engine:
        for _ in range(2):
            completions = runtime.generate(engine, PROMPTS, max_new_tokens=12, ignore_eos=True)
            assert [c.token_ids for c in completions] == expected


def test_forks_copy_blocks(artifact):
    with runtime.load(artifact) as engine:
        samples = runtime.generate(engine, PROMPTS[3], n=3, max_new_tokens=12, ignore_eos=True)
        assert [c.token_ids for c in samples] == [greedy(PROMPTS[3], 12)] * 3
        assert engine.stats().copied_blocks == 2


def test_logprobs_come_through_the_abi(artifact):
    with runtime.load(artifact) as engine:
        prompt = PROMPTS[2] + greedy(PROMPTS[2], 4)
        scored = runtime.generate(engine, prompt, max_new_tokens=0, prompt_logprobs=0)[0].prompt_logprobs
        drawn = runtime.generate(engine, PROMPTS[2], max_new_tokens=4, logprobs=0)[0].logprobs
        assert [s.logprob for s in scored[-4:]] == [d.logprob for d in drawn]


def test_penalties_change_no_log_probability(artifact):
    plain, options = greedy(PROMPTS[2], 8), dict(max_new_tokens=8, ignore_eos=True)
    wanted = greedy(PROMPTS[2], 8, penalty=1.25)
    assert wanted != plain
    with runtime.load(artifact) as engine:
        requests = [
            engine.submit(PROMPTS[2], Sampling(**options, **more))
            for more in (dict(repetition_penalty=1.25, logprobs=0), {}, dict(repetition_penalty=1.25))
        ]
        done = [request.result() for request in requests]
        assert [each.token_ids for each in done] == [wanted, plain, wanted]
        whole = PROMPTS[2] + wanted
        scored = runtime.generate(engine, whole, max_new_tokens=0, prompt_logprobs=0)[0].prompt_logprobs
        assert done[0].logprobs == scored[-8:]


def test_generate_from_a_path_closes_its_engine(artifact):
    assert runtime.generate(artifact, PROMPTS[0], max_new_tokens=3)[0].token_ids == greedy(PROMPTS[0], 3)
    events = list(runtime.generate(artifact, PROMPTS[0], max_new_tokens=3, stream=True))
    assert [e.token_id for e in events] == greedy(PROMPTS[0], 3)


def test_sampling_parameters_come_through_the_abi(artifact):
    executor = CpuExecutor(Artifact.open(artifact), Limits(16, 2, 2), [2], threads=1)
    args = SampleArgs(
        temperature=np.array([0.5, 1], np.float32),
        top_k=np.array([3, 4], np.int32),
        top_p=np.array([0.25, 1], np.float32),
        min_p=np.array([0, 0.125], np.float32),
        seed=np.array([2**40, 9], np.uint64),
        sample_index=np.array([5, 6], np.int32),
        position=np.array([7, 8], np.int32),
        num_top=7,
    )
    sampled = executor.sample(np.zeros((2, VOCAB), np.float32), args)
    assert sampled.top_logprobs.tolist() == [[0.5, 0.25, 0, 3, 2.0**40, 5, 7], [1, 1, 0.125, 4, 9, 6, 8]]
    assert sampled.top_ids[1].tolist() == [100 + k for k in range(7)]
    np.testing.assert_allclose(sampled.logprobs, -np.log(VOCAB), rtol=1e-6)
    executor.close()
    executor.close()
    with pytest.raises(EngineError, match="closed"):
        executor.sample(np.zeros((2, VOCAB), np.float32), args)


def test_weights_move_into_huge_pages_behind_a_running_engine(artifact, monkeypatch):
    loaded, copy = threading.Event(), Weights.copy
    monkeypatch.setattr(machine, "has_huge_pages", lambda: True)
    monkeypatch.setattr(Weights, "copy", lambda self, stop: loaded.wait() and copy(self, stop))
    with runtime.load(artifact) as engine:
        weights = engine._executor._weights
        mapped, held = list(weights.addresses), [bytes(t) for t in weights.tensors]
        loaded.set()
        engine._executor._mover.join()
        assert not set(mapped) & set(weights.addresses)
        assert [bytes(t) for t in weights.tensors] == held
        assert runtime.generate(engine, PROMPTS[0], max_new_tokens=3)[0].token_ids == greedy(PROMPTS[0], 3)


def test_a_large_file_stays_mapped(artifact, monkeypatch):
    monkeypatch.setattr(machine, "has_huge_pages", lambda: True)
    size = Artifact.open(artifact).manifest.files["weights/cpu.safetensors"].bytes
    monkeypatch.setattr(machine, "free_memory", lambda: 2 * size)
    executor = CpuExecutor(Artifact.open(artifact), Limits(16, 2, 2), [2], threads=1)
    assert not executor._mover.is_alive()
    executor.close()


def test_a_compiles_trial_copies_no_weights(artifact, monkeypatch):
    monkeypatch.setattr(machine, "has_huge_pages", lambda: True)
    executor = open_executor(Artifact.open(artifact), "cpu", Limits(16, 2, 2), [2])
    assert executor._mover.ident is None  # never started
    executor.close()


def test_weights_stay_mapped_where_a_copy_gets_no_memory(artifact, monkeypatch):
    def refuse(size, what):
        raise ResourceError(f"{size} bytes for {what}")

    raised = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    monkeypatch.setattr(machine, "has_huge_pages", lambda: True)
    monkeypatch.setattr("runtime.weights.anonymous", refuse)
    with runtime.load(artifact) as engine:
        engine._executor._mover.join()
        assert runtime.generate(engine, PROMPTS[0], max_new_tokens=3)[0].token_ids == greedy(PROMPTS[0], 3)
    assert not raised


def test_a_failed_forward_fails_its_request_alone(artifact):
    with runtime.load(artifact) as engine:
        with pytest.raises(EngineError, match="octavo_forward failed with code 13"):
            runtime.generate(engine, [13])
        assert runtime.generate(engine, PROMPTS[0], max_new_tokens=2)[0].token_ids == greedy(PROMPTS[0], 2)


def test_a_library_that_cannot_start_is_refused(artifact):
    with pytest.raises(ResourceError, match="could not start.* use fewer than 77 threads"):
        runtime.load(artifact, threads=77)
    assert runtime.generate(artifact, PROMPTS[0], Sampling(max_new_tokens=1))


def test_one_thread_is_not_told_to_use_fewer(artifact, tmp_path):
    files = {name: (artifact / name).read_bytes() for name in made.default_files()}
    raw = made.manifest(files)
    raw["targets"]["cpu"]["weight_order"] = ["w0"]  # of two that the library reads
    with pytest.raises(ResourceError) as refused:
        runtime.load(made.write(tmp_path / "lacks.octavo", files, raw), threads=1)
    assert refused.value.todo == "Check memory, or compile the model again"


def test_what_is_no_library_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="cannot be used"):
        runtime.load(made.write(tmp_path / "text.octavo"))
    with pytest.raises(ArtifactError, match="octavo_close"):
        library = build(tmp_path, "-Doctavo_close=other")
        runtime.load(made.write(tmp_path / "lacks.octavo", made.default_files(library)))


def test_a_replaced_artifact_is_loaded_anew(artifact, tmp_path):
    """The dynamic loader would take a path that it knows for the library that it has."""
    root = made.write(tmp_path / "a.octavo", made.default_files(build(tmp_path)))
    with runtime.load(root) as before:
        (root / "targets/cpu/kernels/forward.any.so").unlink()
        made.write(root, made.default_files(build(tmp_path, "-DSTART=1u")))
        with runtime.load(root) as after:
            sampling = Sampling(max_new_tokens=9, ignore_eos=True)
            old, new = (engine.submit(PROMPTS[3], sampling).result().token_ids for engine in (before, after))
    assert old == greedy(PROMPTS[3], 9) != new


@pytest.mark.parametrize("folder", ["targets/cpu", made.DRAFT])
def test_a_library_that_is_cut_short_is_refused(artifact, tmp_path, folder):
    """Signed as it is: the loader would map pages that the file lacks, and the first touch is a SIGBUS."""
    files, name = made.default_files(), f"{folder}/kernels/forward.any.so"
    files["targets/cpu/kernels/forward.any.so"] = (
        artifact / "targets/cpu/kernels/forward.any.so"
    ).read_bytes()
    raw = made.with_draft(files)
    files[name] = files[name][: len(files[name]) // 2]
    path = made.write(tmp_path / "cut.octavo", files, raw | {"files": made.manifest(files)["files"]})
    with pytest.raises(ArtifactError, match=f"{name}: .*cut short by .* bytes.*Rebuild the kernels"):
        runtime.load(path, draft="self")


def test_the_arena_is_planned_for_the_largest_step():
    plan = Plan.parse(b'{"arena": {"T": 100, "Q": 10, "R": 1, "": 7}}', "plan.json")
    assert plan.arena_bytes(Limits(17, 3, 14)) == 100 * 32 + 10 * 32 + 16 + 7
    with pytest.raises(ArtifactError, match="unknown term 'X'"):
        Plan.parse(b'{"arena": {"X": 1}}', "plan.json")
