"""Whole small models through compiler and executors: kernels for GPUs, in Triton's interpreter, beside the
CPU's, which tests/model compares with transformers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers

import compiler
import compiler.trial
from tests.model import tiny
from tests.model.harness import Stepper
from tests.triton.test_attention import multiply_by_element

TARGETS = ("cpu", "triton-interpret")
# Two experts chosen of 5 by a softmax; two of the better group of 4, beside one that all tokens share.
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=5, num_experts_per_tok=2, intermediate_size=40),
    "deepseek_v3": dict(
        n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
        moe_intermediate_size=24, num_key_value_heads=3, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16, head_dim=8,
    ),
}  # fmt: skip
NAMES = ("llama", "gemma2", "gpt2", "qwen3", *EXPERTS)
TWO_LAYERS = {"gemma2": dict(num_hidden_layers=2)}  # one of them with a window of 12
TOLERANCE = 1e-4  # of the logits' standard deviation

# Tokens of each request in each of 9 steps: prompts in chunks beside decode steps, over the end of a block.
COUNTS = (
    (9, 7, 1, 1, 1, 1, 1, 1, 1),
    (0, 5, 1, 13, 1, 0, 1, 1, 1),
    (0, 0, 1, 2, 1, 17, 0, 1, 1),
)


def steps() -> list[list[tuple[int, int, int]]]:
    """Chunks (request, first, last) of every step; the order of the requests changes from step to step."""
    ends = np.cumsum(COUNTS, axis=1)
    found = []
    for step in range(len(COUNTS[0])):
        order = np.roll(np.arange(len(COUNTS)), step)
        found.append(
            [
                (int(r), int(ends[r][step]) - COUNTS[r][step], int(ends[r][step]))
                for r in order
                if COUNTS[r][step]
            ]
        )
    return found


def checkpoint(name: str, directory: Path) -> Path:
    base = tiny.CONFIGS["llama"] | EXPERTS[name] if name in EXPERTS else tiny.CONFIGS[name]
    config = transformers.AutoConfig.for_model(name, **base | TWO_LAYERS.get(name, {}))
    transformers.set_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    tiny.randomize(model)
    model.float().save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_cpu_target(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler.trial, "MAX_INTERPRETED", 0)  # the compile's own trial: this one is longer
    source = checkpoint(name, tmp_path / name)
    out = tiny.compiled(source, tmp_path / "m.octavo", target=TARGETS)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(0, tiny.VOCAB, sum(counts)).tolist() for counts in COUNTS]
    expected, found = (Stepper(out, target=target).batch(prompts, steps()) for target in TARGETS)
    for request, (want, have) in enumerate(zip(expected, found, strict=True)):
        assert len(want) == len(prompts[request])
        assert np.abs(want - have).max() < TOLERANCE * want.std(), request


INT4 = {"quantize": "int4", "kv": "int4", "block": 16}


@pytest.mark.parametrize(
    ("name", "quantized"),
    [("llama", {}), ("llama", INT4), ("mixtral", INT4)],
    ids=["f32", "int4", "experts of int4"],
)
def test_an_invariant_models_bits_do_not_depend_on_chunks_or_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, quantized: dict[str, Any]
) -> None:
    """Of int4 with activations in i8 and keys whose scales are a block's."""
    monkeypatch.setattr(compiler.trial, "MAX_INTERPRETED", 0)
    source = checkpoint(name, tmp_path / name)
    out = compiler.compile(
        source, tmp_path / "m.octavo", target="triton-interpret", invariant=True, **quantized
    )
    multiply_by_element(monkeypatch)
    ids, other = (np.random.default_rng(n).integers(0, tiny.VOCAB, n).tolist() for n in (38, 20))
    stepper = Stepper(out, 64, target="triton-interpret")
    (want,) = stepper.batch([ids], [[(0, 0, 38)]])
    mixed, _ = stepper.batch(
        [ids, other], [[(1, 0, 9), (0, 0, 20)], [(0, 20, 21)], [(0, 21, 38), (1, 9, 20)]]
    )
    assert np.array_equal(mixed, want)
