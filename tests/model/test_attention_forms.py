"""Attention with more than a mask: compiled tiny models against transformers' logits, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.model import tiny
from tests.model.harness import Stepper

LENGTHS = (1, 15, 16, 17, 70)
NUM_FORCED = 6
TOLERANCE = 1e-4  # of the reference logits' standard deviation

_COMMON = dict(
    vocab_size=tiny.VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=tiny.CONTEXT, initializer_range=0.1, bos_token_id=1,
    eos_token_id=2, pad_token_id=0,
)  # fmt: skip

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "a bias of the key's token": ("doge", _COMMON),
    "streams of the residual, and layers that read another's keys": (
        "gemma3n_text",
        _COMMON
        | dict(
            num_hidden_layers=4, num_kv_shared_layers=2, head_dim=12, sliding_window=8, laurel_rank=6,
            hidden_size_per_layer_input=10, vocab_size_per_layer_input=tiny.VOCAB,
            layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")],
            activation_sparsity_pattern=[0.9, 0.0, 0.0, 0.0],
        ),
    ),
}  # fmt: skip


def build(name: str) -> Any:
    torch.manual_seed(0)
    kind, changes = FORMS[name]
    config = transformers.AutoConfig.for_model(kind, **changes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tiny.randomize(model)
    return model.eval().float()


@pytest.mark.parametrize("name", FORMS)
def test_logits_are_the_references_whatever_the_chunks(tmp_path: Path, name: str) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "checkpoint")
    stepper = Stepper(tiny.compiled(tmp_path / "checkpoint", tmp_path / "m.octavo"), tiny.CONTEXT)
    for length in LENGTHS:
        rng = np.random.default_rng(length)
        ids = [int(i) for i in rng.integers(3, tiny.VOCAB, length + NUM_FORCED)]
        want = tiny.reference_logits(model, ids).numpy()
        forced = [[token] for token in ids[length:]]
        got = stepper.run([ids[:length], *forced])
        assert np.abs(got - want).max() < TOLERANCE * want.std()
        parts = [ids[i : i + 7] for i in range(0, length, 7)]
        parts[-1] = parts[-1][: length - 7 * (len(parts) - 1)]
        np.testing.assert_array_equal(stepper.run([*parts, *forced]), got)
