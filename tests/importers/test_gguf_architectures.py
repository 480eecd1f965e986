"""GGUF files of the architectures that transformers reads give the logits of transformers' own reading.

The files hold random arrays; names, layouts and keys come from transformers' and the gguf package's tables.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from compiler.importers import ImportRefused, load
from tests.importers.compare import TOLERANCE, worst
from tests.model import tiny

ARCHITECTURES = {
    "qwen2": "qwen2", "qwen3": "qwen3", "phi3": "phi3", "stablelm": "stablelm", "gemma2": "gemma2",
    "gemma3": "gemma3_text", "starcoder2": "starcoder2", "gpt2": "gpt2", "nemotron": "nemotron",
    "falcon": "falcon", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe",
}  # fmt: skip
OTHER = {
    "falcon": dict(multi_query=True, new_decoder_architecture=False),
    "qwen3": dict(head_dim=128),  # what transformers does not read of these is its own default
    "phi3": dict(vocab_size=32064),
    "starcoder2": dict(vocab_size=49152),
    "gpt2": dict(vocab_size=50257, n_positions=1024),
    "gemma3_text": dict(head_dim=32, sliding_window=9),
    "gemma2": dict(sliding_window=9),
    "stablelm": dict(num_key_value_heads=3),
    "qwen2_moe": dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=1408),
    "qwen3_moe": dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=768, head_dim=32),
}


def config_of(architecture: str) -> Any:
    model_type = ARCHITECTURES[architecture]
    shape = tiny.CONFIGS.get(model_type, tiny.CONFIGS["llama"]) | OTHER.get(model_type, {})
    return transformers.AutoConfig.for_model(model_type, **shape | {"num_hidden_layers": 2})


def write(path: Path, architecture: str, **extra: Any) -> Path:
    config = config_of(architecture)
    model = transformers.AutoModelForCausalLM.from_config(config)
    writer = gguf.GGUFWriter(path, architecture)
    for key, attribute in GGUF_CONFIG_MAPPING[architecture.replace("moe", "_moe")].items():
        value = getattr(config, attribute, None) if attribute else None
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
    for key, value in extra.items():
        add = writer.add_uint32 if isinstance(value, int) else writer.add_float32
        add(f"{architecture}.{key.replace('__', '.')}", value)
    writer.add_vocab_size(config.vocab_size)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    state, rng = model.state_dict(), np.random.default_rng(0)
    for name, own in get_gguf_hf_weights_map(model, processor).items():
        if own == "lm_head.weight" and config.tie_word_embeddings:
            continue
        shape, suffix = tuple(state[own].shape), ".weight" if name.endswith("_exps") else ""
        if "gate_exps" in name or "up_exps" in name:  # the file has both halves as tensors of their own
            shape = (shape[0], shape[1] // 2, shape[2])
        if "gate_inp_shexp" in name:
            shape = shape[1:]
        shape = shape[::-1] if architecture == "gpt2" and any(p in name for p in ("attn_", "ffn_")) else shape
        array = rng.standard_normal(shape) * 0.1 + ("norm.weight" in name)
        writer.add_tensor(name + suffix, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", architecture)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    imported = load(path, max_context=64)
    assert max(worst(imported, model, length, tiny.VOCAB) for length in (1, 17, 40)) <= TOLERANCE


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [
        ("phi3", {"attention__sliding_window": 9}, "phi3.attention.sliding_window is 9"),
        ("gemma2", {"final_logit_softcapping": 20.0}, "final_logit_softcapping is 20.0"),
        ("qwen2", {"rope__dimension_count": 16}, "rope.dimension_count is 16, but transformers rotates 32"),
        ("qwen2", {"logit_scale": 2.0}, "qwen2.logit_scale is 2.0"),
    ],
)
def test_what_transformers_would_not_read_is_refused(
    architecture: str, extra: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ImportRefused, match=message):
        load(write(tmp_path / "m.gguf", architecture, **extra), max_context=64)
