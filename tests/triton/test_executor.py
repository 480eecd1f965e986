"""A model of two layers through the executor for GPUs, on Triton's interpreter: steps by hand against the
reference in float64, and a whole engine. The same without Triton, in more steps, is in
tests/runtime/test_gpu_executor.py.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from codegen.kv_block import block_bytes
from runtime import ArtifactError, Sampling, sampler
from runtime.engine import Engine
from runtime.executor import SampleArgs
from runtime.gpu.compiled import Compiled
from runtime.gpu.device import KernelSpec
from runtime.gpu.executor import GpuExecutor
from runtime.gpu.interpret import InterpretedDevice
from runtime.gpu.plan import Plan
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.limits import Limits
from runtime.manifest import KVGroup, Model
from runtime.step import Step
from runtime.weights import Weights
from tests.codegen.harness import Chunk, empty_states, pack_step, reference_step
from tests.codegen.test_forward import TABLE_A, TABLE_B, A, B, V, graph
from tests.runtime import made
from tests.triton.harness import TritonModel

CONTEXT, BLOCKS, BLOCK = 128, 24, 16
WIDTH = CONTEXT // BLOCK
LIMITS = Limits(max_step_tokens=56, max_requests=4, score_rows=52)
MODEL = Model("f32", V, CONTEXT, None, ())


class Poisoned(InterpretedDevice):
    """Its fresh memory is NaN in every type of float."""

    def allocate(self, num_bytes: int, what: str) -> int:
        address = super().allocate(num_bytes, what)
        ctypes.memset(address, 255, num_bytes)
        return address


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TritonModel:
    return TritonModel(graph(), None, tmp_path_factory.mktemp("executor"))


def opened(
    model: TritonModel,
    folder: Path,
    buckets: Sequence[int] | None = None,
    *,
    about: Model = MODEL,
    limits: Limits = LIMITS,
    num_blocks: Sequence[int] = (BLOCKS, BLOCKS),
    swap_blocks: int = 0,
) -> GpuExecutor:
    generated = model.generated
    tensors = dict(zip(generated.weight_order, model.packed, strict=True))
    (folder / "w.safetensors").write_bytes(made.safetensors(tensors))
    (folder / "kernels.py").write_text(generated.source)
    specs = [
        KernelSpec(k.name, k.function, k.function, k.signature, k.constants, k.num_warps, 0, None)
        for k in generated.kernels
    ]
    groups = [
        KVGroup(kv.layers, kv.window, kv.block, block_bytes(kv), kv.bytes_per_token, state=kv.state)
        for kv in model.states
    ]
    compiled = Compiled(
        target="triton-interpret",
        plan=Plan.parse(json.dumps(generated.plan).encode(), "plan.json"),
        kernels=specs,
        weights=Weights(folder / "w.safetensors", generated.weight_order),
        model=about,
        groups=groups,
    )
    device = Poisoned(folder / "kernels.py")
    return GpuExecutor(device, compiled, limits, num_blocks, buckets=buckets, swap_blocks=swap_blocks)


def packed(chunks: Sequence[Chunk], rows: Sequence[int] | None = None) -> Step:
    arrays = pack_step(chunks, WIDTH)
    table = np.maximum(arrays["table"], 0)
    return Step(
        *(arrays[name] for name in ("ids", "pos", "starts", "lens")),
        rows=np.asarray(range(len(arrays["ids"])) if rows is None else rows, np.int32),
        slots=[arrays["slots"]] * 2,
        tables=[table] * 2,
    )


def test_steps_are_the_references(
    model: TritonModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts together; two requests decode in a bucket of four; one beside a prompt; then three decode.

    Tables have the columns of the longest request, three, rounded up.
    """
    monkeypatch.setattr("runtime.gpu.steps.LEAST_WIDTH", 1)
    executor, states = opened(model, tmp_path, buckets=[4]), empty_states(model.graph, BLOCKS)
    steps = [
        [Chunk(TABLE_A[:3], 0, A[:33]), Chunk(TABLE_B[:2], 0, B[:17])],
        [Chunk(TABLE_A[:3], 33, A[33:34]), Chunk(TABLE_B[:2], 17, B[17:18])],
        [Chunk(TABLE_A, 34, A[34:35]), Chunk([1], 0, B[:3])],
        [Chunk([1], 3, B[3:4]), Chunk(TABLE_B[:2], 18, B[18:19]), Chunk(TABLE_A, 35, A[35:36])],
    ]
    for chunks in steps:
        got = executor.download(executor.forward(packed(chunks)))
        want, states = reference_step(model.graph, model.weights, states, chunks)
        assert got.shape == want.shape and np.abs(got - want).max() < 1e-5 * want.std()
    assert list(executor._steps._recorded) == [(4, 4)]
    executor.close()


def test_rows_are_sampled_where_they_lie(model: TritonModel, tmp_path: Path) -> None:
    """Some of a step's rows, in another order, each with parameters of its own, beside what numpy makes of
    them."""
    executor = opened(model, tmp_path)
    chosen = executor.forward(packed([Chunk(TABLE_B[:2], 0, B[:17])], rows=[16, 3, 9, 12, 0]))[[4, 0, 1]]
    logits = executor.download(chosen)
    args = SampleArgs(
        temperature=np.array([0, 0.7, 1.3], np.float32),
        top_k=np.array([0, 5, 0], np.int32),
        top_p=np.array([1, 1, 0.8], np.float32),
        min_p=np.array([0, 0, 0.01], np.float32),
        seed=np.array([1, 2**63 + 5, 7], np.uint64),
        sample_index=np.array([0, 1, 2], np.int32),
        position=np.array([1, 17, 4], np.int32),
        num_top=3,
    )
    found = executor.sample(chosen, args)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "sample_index", "position")
    for i, row in enumerate(logits):
        assert found.ids[i] == sampler.sample(row, **{name: getattr(args, name)[i].item() for name in names})
        ids, logprobs = sampler.top(row, 3)
        assert found.top_ids[i].tolist() == ids.tolist()
        np.testing.assert_allclose(found.top_logprobs[i], logprobs, atol=1e-5)
        np.testing.assert_allclose(found.logprobs[i], sampler.log_softmax(row)[found.ids[i]], atol=1e-5)
    given = np.array([3, 1, 4], np.int32)
    expected = sampler.log_softmax(logits)[np.arange(3), given]
    np.testing.assert_allclose(executor.logprobs(chosen, given), expected, atol=1e-5)
    other = (np.arange(2 * V, dtype=np.float32) % 31).reshape(2, V)
    executor.overwrite(chosen, np.array([2, 0]), other)
    want = np.stack([other[1], logits[1], other[0]])
    assert executor.download(chosen).tobytes() == want.tobytes()
    assert executor.sample(chosen, SampleArgs.greedy(3, 0)).ids.tolist() == want.argmax(-1).tolist()
    executor.close()


def test_an_engine_generates_the_references_tokens(model: TritonModel, tmp_path: Path) -> None:
    """Three requests, in steps of a prompt's chunk beside single tokens; the window gives blocks back."""
    windows = [kv.window for kv in model.states]
    cache = Cache([Group(BLOCKS, window) for window in windows])
    drawn = Sampling(max_new_tokens=3, temperature=0.8, top_k=20, seed=11, logprobs=1)
    requests = [(A[:40], Sampling(max_new_tokens=4)), (B[:17], drawn), (B[5:12], Sampling(max_new_tokens=2))]
    with Engine(opened(model, tmp_path), MODEL, cache, LIMITS) as engine:
        done = [engine.submit(ids, sampling) for ids, sampling in requests]
        for (ids, sampling), request in zip(requests, done, strict=True):
            found = request.result()
            wanted, logits = generated(model, ids, sampling)
            assert found.token_ids == wanted
            for entry, row in zip(found.logprobs or [], logits, strict=sampling is drawn):
                assert abs(entry.logprob - sampler.log_softmax(row)[entry.token_id]) < 1e-4
        assert engine.stats().target == "triton-interpret"


def generated(model: TritonModel, ids: list[int], sampling: Sampling) -> tuple[list[int], list[np.ndarray]]:
    """Tokens, and the logits [V] of each, by the reference."""
    tokens, rows = list(ids), []
    for _ in range(sampling.max_new_tokens):
        chunk = [Chunk(list(range(WIDTH)), 0, tokens)]
        logits, _ = reference_step(
            model.graph, model.weights, empty_states(model.graph, WIDTH), chunk, [len(tokens) - 1]
        )
        rows.append(logits[0])
        tokens.append(
            sampler.sample(
                logits[0],
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                seed=sampling.seed or 0,
                position=len(tokens),
            )
        )
    return tokens[len(ids) :], rows


@pytest.mark.parametrize(
    "text", ["def (", "raise ValueError(3)", "import sys; sys.exit(3)", "x = 1", "import triton as x", "\0"]
)
def test_what_is_no_kernel_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "kernels.py").write_text(text)
    spec = KernelSpec("x.0", "x", "x", (), (), 4, 0, None)
    with pytest.raises(ArtifactError, match=r"kernels\.py: .*Compile the model again"):
        InterpretedDevice(tmp_path / "kernels.py").load([spec])
