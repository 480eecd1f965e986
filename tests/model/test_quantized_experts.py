"""Mixtures of experts with weights and cache in few bits: near the model, and the same bits alone, in parts,
beside others and with drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import runtime
from runtime import Sampling
from tests.importers.test_experts import build
from tests.model import tiny
from tests.model.forced import tokens
from tests.model.harness import Stepper


@dataclass(frozen=True)
class Case:
    """most: the error of logits in standard deviations, which is far more where another expert is chosen."""

    name: str
    options: dict[str, Any]
    most: float
    codes: str


CASES = (
    Case("gpt_oss", dict(quantize="int8", kv="int8", draft="self:int4", algorithm="rtn"), 0.2, "i8 g32"),
    Case("deepseek_v3", dict(quantize="int4", symmetric=False, kv="int4", max_kl=9.0), 2.0, "u4 g32"),
)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Any, Path]:
    case, folder = request.param, tmp_path_factory.mktemp(request.param.name)
    model = build(case.name)
    model.save_pretrained(folder / "checkpoint")
    return case, model, tiny.compiled(folder / "checkpoint", folder / "m.octavo", **case.options)


def test_logits_are_near_the_models(made: tuple[Case, Any, Path]) -> None:
    case, model, path = made
    expected = tiny.reference_logits(model, tokens(70)).numpy()
    found = Stepper(path, tiny.CONTEXT).logits(tokens(70))
    error = np.sqrt(np.square(found - expected).mean()) / expected.std()
    assert 1e-4 < error < case.most


def test_a_request_has_the_same_bits_alone_in_parts_and_beside_others(made: tuple[Case, Any, Path]) -> None:
    stepper = Stepper(made[2], tiny.CONTEXT)
    prompts = [tokens(length) for length in (23, 16, 70)]
    parts = [stepper.run([ids[:7], *([i] for i in ids[7:])]) for ids in prompts]
    steps = [
        [(0, 0, 9), (1, 0, 16), (2, 0, 33)],
        [(0, 9, 10), (2, 33, 34)],
        [(2, 34, 70), (0, 10, 23)],
    ]
    for alone, together in zip(parts, stepper.batch(prompts, steps), strict=True):
        assert np.array_equal(alone, together)


def generated(path: Path, drafts: int | None, **options: Any) -> list[Any]:
    """Tokens and log probabilities of two requests that run together."""
    sampling = Sampling(
        max_new_tokens=40, ignore_eos=True, temperature=0.7, seed=3, draft_tokens=drafts, logprobs=1
    )
    with runtime.load(path, **options) as engine:
        requests = [engine.submit(ids, sampling) for ids in (tokens(30), tokens(17) * 2)]
        found = [(c.token_ids, c.logprobs) for request in requests for c in request.results()]
        stats = engine.stats()
        assert stats.draft_failures == 0
        least = {None: 0, "lookup": 1, "self": 10}[options.get("draft")]
        assert not least or stats.draft_positions[0][0] >= least
    return found


def test_drafts_change_no_bit(made: tuple[Case, Any, Path]) -> None:
    case, _, path = made
    expected = generated(path, None)
    assert len({token for ids, _ in expected for token in ids}) > 5
    assert generated(path, 3, draft="self" if "draft" in case.options else "lookup") == expected


def test_stacks_are_codes_and_routers_are_not(made: tuple[Case, Any, Path]) -> None:
    case, _, path = made
    error = Stepper(path, tiny.CONTEXT).artifact.manifest.raw["model"]["quantization"]["error"]
    formats = {e["layer"]: e["format"] for e in error["layers"]}
    stacks = [name for name in formats if ".experts." in name and "shared" not in name]
    assert stacks and all(formats[name] == case.codes for name in stacks)
    assert not any(name.endswith((".router", ".gate")) for name in formats)
