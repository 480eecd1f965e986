"""Compiled for the CPU, ONNX models give onnxruntime's logits at each of 24 forced tokens."""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from tests.importers.onnx.test_forms import CONTEXT, DATA, TOLERANCE
from tests.model import tiny
from tests.model.forced import MUTATIONS
from tests.model.harness import Mutation, Stepper, unchanged

# One of each exporter, and the grid of a quantised one kept.
FORMS = {
    ("gpt2", "dynamo18"): "none",
    ("qwen3", "dynamo24"): "none",
    ("gemma2", "legacy-past"): "none",
    ("llama", "genai-int4"): "own",
}
PROMPT = 15  # tokens that a mutation of decoding leaves alone


@pytest.mark.parametrize(("model", "form"), FORMS)
def test_each_steps_logits_are_onnxruntimes(model: str, form: str, tmp_path: Path) -> None:
    with tarfile.open(DATA / f"{model}.tar.xz") as tar:
        tar.extractall(tmp_path, filter="data")
    folder, quantize = tmp_path / form, FORMS[model, form]
    options = dict(quantize="own", activations="none") if quantize == "own" else {}
    out = tiny.compiled(folder / "model.onnx", tmp_path / "m.octavo", max_context=CONTEXT, **options)
    stepper, ids = Stepper(out, CONTEXT), np.load(tmp_path / "ids.npy").reshape(-1).tolist()
    alone = [[token] for token in ids]
    own = folder / "logits.npy"
    expected = np.load(own if own.exists() else tmp_path / "logits.npy").reshape(len(ids), -1)

    def error(chunks: list[list[int]], mutate: Mutation = unchanged) -> float:
        found = stepper.run(chunks, mutate)
        return float(np.nan_to_num(np.abs(found - expected), nan=np.inf).max() / expected.std())

    assert error(alone) <= TOLERANCE
    for mutate in MUTATIONS:
        assert error([ids[:PROMPT], *alone[PROMPT:]], mutate) > 10 * TOLERANCE, mutate.__name__
