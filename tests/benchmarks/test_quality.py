"""What benchmarks/quality.py makes of logits and answers, and the GGUF files that it compares with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import random_model
import safetensors.numpy

from qualitybench import gguf_files, needle
from qualitybench.divergence import divergence

Array = np.ndarray[Any, np.dtype[Any]]


def test_divergence_by_hand() -> None:
    """Of two tokens: at the first the other halves the odds, at the second it is the same but for a shift."""
    exact = np.log(np.array([[[0.5, 0.25, 0.25], [0.1, 0.2, 0.7], [1.0, 1.0, 1.0]]]))
    other = np.log(np.array([[[0.2, 0.4, 0.4], [0.1, 0.2, 0.7], [1.0, 1e-9, 1.0]]])) + 3.0
    found = divergence(exact, other, np.array([[2, 0, 2]]))
    kl = 0.5 * np.log(0.5 / 0.2) + 0.5 * np.log(0.25 / 0.4)
    assert found.num_tokens == 2  # nothing follows the last
    assert found.mean_kl == pytest.approx(kl / 2) and found.p99_kl == pytest.approx(0.99 * kl)
    assert found.top_agreement == 0.5
    assert found.perplexity == pytest.approx((1 / (0.2 * 0.7)) ** 0.5)
    assert found.perplexity_ratio == pytest.approx((0.5 / 0.2) ** 0.5)


def test_a_logit_that_is_no_number_is_refused() -> None:
    logits = np.zeros((1, 3, 4), np.float32)
    broken = logits.copy()
    broken[0, 1, 2] = np.nan
    with pytest.raises(ValueError, match="no finite number"):
        divergence(logits, broken, np.zeros((1, 3), np.int32))


def test_answers_are_counted_by_key_by_digit_and_by_depth() -> None:
    asked = [needle.Case(depth, "123456789012", ()) for depth in (0.0, 1.0, 1.0)]
    told = needle.told(asked, ["123456789012", "1234560", ""])
    assert (told["num_cases"], told["exact"]) == (3, 1)
    assert told["digit_share"] == pytest.approx((12 + 6) / 36)
    assert told["by_depth"] == {"0.00": 1.0, "1.00": 0.0}


HEADS, KV_HEADS, HIDDEN, INNER = 4, 2, 32, 48
SHAPES = {
    "model.embed_tokens": (40, HIDDEN),
    "model.norm": (HIDDEN,),
    "model.layers.0.input_layernorm": (HIDDEN,),
    "model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
    "model.layers.0.self_attn.k_proj": (HIDDEN // HEADS * KV_HEADS, HIDDEN),
    "model.layers.0.mlp.down_proj": (HIDDEN, INNER),
}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_gguf_file_has_the_weights_that_transformers_reads_back(tmp_path: Path, dtype: str) -> None:
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    rng = np.random.default_rng()
    weights = {name: rng.standard_normal(shape).astype(dtype) for name, shape in SHAPES.items()}
    safetensors.numpy.save_file({f"{n}.weight": w for n, w in weights.items()}, tmp_path / "w.safetensors")
    config = dict(
        model_type="llama", max_position_embeddings=64, hidden_size=HIDDEN, num_hidden_layers=1,
        intermediate_size=INNER, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, rms_norm_eps=1e-5,
        rope_theta=10000.0, vocab_size=40,
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    gguf_files.write(tmp_path, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    processor = LlamaTensorProcessor(config=dict(num_attention_heads=HEADS, num_key_value_heads=KV_HEADS))
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "blk.0.ffn_down": "down_proj"}
    names |= {"blk.0.attn_q": "q_proj", "blk.0.attn_k": "k_proj", "blk.0.attn_norm": "input_layernorm"}
    assert len(stored) == len(weights) == len(names)
    for name, end in names.items():
        tensor = stored[f"{name}.weight"]
        wanted = next(w for n, w in weights.items() if n.endswith(end))
        read = processor.process(tensor.data, f"{name}.weight").weights
        np.testing.assert_array_equal(read, wanted)
        assert tensor.data.dtype == (dtype if wanted.ndim == 2 else "float32")
    assert reader.fields["llama.vocab_size"].contents() == 40


def test_experts_of_a_gguf_file_are_stacks_in_order_and_heads_stay_as_they_are(tmp_path: Path) -> None:
    """More than ten experts, whose names are not in the order of their numbers."""
    seed = int(np.random.default_rng().integers(1 << 30))
    random_model.command(
        tmp_path, "m", layers=2, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, intermediate=INNER,
        experts=11, chosen=3, vocab=40, seed=seed,
    )  # fmt: skip
    weights: dict[str, Array] = {}
    for file in (tmp_path / "m").glob("*.safetensors"):
        weights |= safetensors.numpy.load_file(file)
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    stored = {tensor.name.removesuffix(".weight"): np.array(tensor.data) for tensor in reader.tensors}
    assert len(stored) == 3 + 2 * 12
    for i in range(2):
        layer = f"model.layers.{i}"
        for name in ("gate", "up", "down"):
            each = [weights[f"{layer}.mlp.experts.{e}.{name}_proj.weight"] for e in range(11)]
            np.testing.assert_array_equal(stored[f"blk.{i}.ffn_{name}_exps"], np.stack(each))
        np.testing.assert_array_equal(stored[f"blk.{i}.ffn_gate_inp"], weights[f"{layer}.mlp.gate.weight"])
        np.testing.assert_array_equal(stored[f"blk.{i}.attn_q"], weights[f"{layer}.self_attn.q_proj.weight"])
    facts = {name: field.contents() for name, field in reader.fields.items()}
    counts = {"expert_count": 11, "expert_used_count": 3, "expert_feed_forward_length": INNER}
    wanted = {**counts, "attention.key_length": HIDDEN // HEADS}
    assert facts["general.architecture"] == "qwen3moe"
    assert {name: facts[f"qwen3moe.{name}"] for name in wanted} == wanted


def test_another_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="a gpt2 model; only names of llama, qwen3_moe and mamba are known"):
        gguf_files.write(tmp_path, tmp_path / "m.gguf")
