"""octavo compile --draft self:int4: a draft on the blocks of its target, quantised by channel, with a tail.

No bit of the output depends on it. That the draft reads the target's keys and values shows in how often it is
right: by chance it would be once in as many times as there are tokens.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import compiler
import runtime
from codegen.cpp import find_level
from compiler import driver, importers
from compiler.importers import Imported, ModelInfo
from compiler.inspect.summary import summary
from compiler.survey import Survey
from compiler.weights import ArraySource
from runtime import Artifact, ArtifactError, Sampling
from runtime.completion import Completion
from runtime.sampler import gumbel
from runtime.scheduler import Chunk
from runtime.speculation.self import SelfDrafter
from tests.codegen.harness import levels
from tests.compiler.decoder import Decoder
from tests.runtime.made import sign

LEVEL = find_level(levels()[-1]).name
VOCAB, CONTEXT = 61, 192
DECODER = Decoder(windows=[None, 24], heads=4, kv_heads=2, size=16, vocab=VOCAB, context=CONTEXT)
PROMPTS = [np.random.default_rng(n).integers(3, VOCAB, n).tolist() for n in (55, 3, 62, 20)]
SAMPLINGS = [
    dict(logprobs=2),
    dict(temperature=1.0, seed=3, n=2, logprobs=0),
    dict(temperature=0.7, seed=4, top_p=0.9),
    dict(temperature=1.0, seed=5, repetition_penalty=1.3, logprobs=1),
]


def imported(source: Any, **options: Any) -> Imported:
    rng, graph = np.random.default_rng(7), DECODER.graph()
    arrays = {w.name: rng.normal(size=w.type.shape, scale=0.2).astype(np.float32) for w in graph.weights}  # type: ignore[union-attr]
    for name in arrays:
        arrays[name] += np.float32("norm" in name)
    return Imported(graph, ArraySource(arrays), ModelInfo("made", VOCAB, CONTEXT))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importers, "load", imported)
        patch.setattr(driver, "survey", lambda source, *, weights: Survey("module", [100]))
        out = tmp_path_factory.mktemp("draft") / "made.octavo"
        return compiler.compile(
            None, out, isa=[LEVEL], kv="int4", draft="self:int4", algorithm="rtn", max_kl=100.0
        )


def generated(engine: runtime.Engine, drafts: int | None) -> list[list[Completion]]:
    options: dict[str, Any] = dict(max_new_tokens=70, ignore_eos=True, draft_tokens=drafts)
    requests = [
        engine.submit(prompt, Sampling(**options, **more))
        for prompt, more in zip(PROMPTS, SAMPLINGS, strict=True)
    ]
    return [request.results() for request in requests]


def said(completions: list[list[Completion]]) -> list[Any]:
    return [(c.token_ids, c.logprobs, c.text, c.finish_reason) for each in completions for c in each]


def test_no_bit_depends_on_it(artifact: Path) -> None:
    with runtime.load(artifact) as engine:
        want = said(generated(engine, None))
    with runtime.load(artifact, draft="self") as engine:
        for drafts in (None, 1, 5):
            assert said(generated(engine, drafts)) == want
        stats = engine.stats()
        assert stats.draft_failures == 0
        (drafted, accepted), *_ = stats.draft_positions
        assert drafted > 200 and drafted > accepted > drafted / 4


@pytest.mark.parametrize("part", ["target", "draft"])
def test_weights_in_another_order_are_refused(artifact: Path, tmp_path: Path, part: str) -> None:
    """Signed as they are: the library finds its weights by their place alone."""
    copy = tmp_path / "other.octavo"
    shutil.copytree(artifact, copy)
    raw = json.loads((copy / "manifest.json").read_text())
    entry = raw["targets"]["cpu"] if part == "target" else raw["targets"]["cpu"]["draft"]
    entry["weight_order"][:2] = reversed(entry["weight_order"][:2])
    (copy / "manifest.json").write_text(json.dumps(sign(raw)))
    with pytest.raises(ArtifactError, match=r"manifest.json: weight_order\[0\] is .*the compiled code reads"):
        runtime.load(copy, draft="self")


def test_what_drafts_are_drawn_from(artifact: Path) -> None:
    """Each of the draft's rows gives the draft again, by the sampler's rules and the request's noise."""
    seen: list[int] = []

    def looking(self: SelfDrafter, chunk: Chunk) -> np.ndarray | None:
        seq = chunk.seq
        found = distributions(self, chunk)
        assert found is not None and found.shape == (chunk.drafts, VOCAB)
        np.testing.assert_allclose(found.sum(-1), 1, rtol=1e-6)
        for i, p in enumerate(found):
            position, logs = seq.num_tokens + i, np.log(np.maximum(p, 1e-300))
            noisy = logs + gumbel(VOCAB, seq.request.seed, position, seq.sample_index)
            seen.append(int(seq.ids[position] == np.where(p > 0, noisy, -np.inf).argmax()))
        return found

    distributions = SelfDrafter.distributions
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SelfDrafter, "distributions", looking)
        with runtime.load(artifact, draft="self", acceptance="rejection") as engine:
            generated(engine, 3)
            stats = engine.stats()
    assert stats.draft_failures == 0 and len(seen) > 100 and np.mean(seen) > 0.98
    assert stats.accepted_tokens > stats.drafted_tokens / 4


def test_the_manifest_and_the_memory_plan_have_it(artifact: Path) -> None:
    found = Artifact.open(artifact)
    draft, entry = found.draft(), found.manifest.raw["targets"]["cpu"]["draft"]
    assert draft.weights == "targets/cpu/draft/weights.safetensors" and draft.draft is None
    quantization = entry["quantization"]
    assert (quantization["weights"], quantization["group"], quantization["algorithm"]) == ("int4", 32, "rtn")
    assert 0 < quantization["error"]["top1_agreement"] < 1
    assert summary(found)["bytes"]["files"][draft.weights] == found.manifest.files[draft.weights].bytes
    plain, planned = (runtime.plan(artifact, kv_blocks=9, draft=name) for name in ("lookup", "self"))
    assert planned.draft is not None and planned.kv_bytes == plain.kv_bytes
    assert planned.draft.weight_bytes == found.manifest.files[draft.weights].bytes
    assert planned.draft.workspace.logits == 64 * VOCAB * 4
    assert planned.total_bytes - plain.total_bytes == planned.draft.total
    assert "draft" in str(planned) and "draft" not in str(plain)
