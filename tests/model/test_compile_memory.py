"""Compiling a model with one very large tensor takes less anonymous memory than that tensor and 300 MB."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import transformers

from tests.model.measured import MEGABYTE, compile_measured

VOCAB, HIDDEN, FFN, HEADS = 200_000, 1024, 256, 4
LARGEST = VOCAB * HIDDEN * 2  # bytes, bfloat16


def arrays() -> dict[str, Any]:
    """Random bfloat16 arrays of a one-layer model with a tied head. The largest repeats one block."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16)

    found = {"model.embed_tokens.weight": np.tile(random(VOCAB // 100, HIDDEN), (100, 1))}
    for name in ("q", "k", "v", "o"):
        found[f"model.layers.0.self_attn.{name}_proj.weight"] = random(HIDDEN, HIDDEN)
    for name, shape in {"gate": (FFN, HIDDEN), "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}.items():
        found[f"model.layers.0.mlp.{name}_proj.weight"] = random(*shape)
    for name in ("layers.0.input_layernorm", "layers.0.post_attention_layernorm", "norm"):
        found[f"model.{name}.weight"] = np.ones(HIDDEN, ml_dtypes.bfloat16)
    return found


def huggingface(directory: Path) -> Path:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, num_hidden_layers=1, max_position_embeddings=256, tie_word_embeddings=True,
    )  # fmt: skip
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config.to_dict() | {"model_type": "llama"}))
    safetensors.numpy.save_file(arrays(), directory / "model.safetensors")
    return directory


def gguf_file(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, array in arrays().items():
        stored = names.get_name(name.removesuffix(".weight")) + ".weight"
        kind = gguf.GGMLQuantizationType.BF16 if array.ndim == 2 else gguf.GGMLQuantizationType.F32
        data = array.view(np.uint8) if array.ndim == 2 else array.astype(np.float32)
        writer.add_tensor(stored, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("form", "dtype"), [("huggingface", "bf16"), ("gguf", "f32")])
def test_the_largest_tensor_is_in_memory_once_at_most(form: str, dtype: str, tmp_path: Path) -> None:
    source = huggingface(tmp_path / "hf") if form == "huggingface" else gguf_file(tmp_path / "m.gguf")
    taken = compile_measured(source, tmp_path / "m.octavo", dtype, ["v3"])
    print(f"{form} to {dtype}: {taken}")
    assert taken.peak_bytes < LARGEST + 300 * MEGABYTE


EXPERTS, INNER = 200, 512


def experts(directory: Path) -> Path:
    """A mixture of experts with a matrix for each expert, as they are published."""
    config: Any = transformers.AutoConfig.for_model(
        "qwen3_moe", vocab_size=512, hidden_size=HIDDEN, intermediate_size=FFN, num_attention_heads=HEADS,
        head_dim=64, num_key_value_heads=HEADS, num_hidden_layers=1, max_position_embeddings=256,
        num_experts=EXPERTS, num_experts_per_tok=4, moe_intermediate_size=INNER, tie_word_embeddings=True,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shapes = {"embed_tokens": (512, HIDDEN), "layers.0.mlp.gate": (EXPERTS, HIDDEN)}
    shapes |= {f"layers.0.self_attn.{name}_proj": (HEADS * 64, HIDDEN) for name in "qkv"}
    shapes |= {"layers.0.self_attn.o_proj": (HIDDEN, HEADS * 64)}
    shapes |= {f"layers.0.self_attn.{name}_norm": (64,) for name in "qk"}
    shapes |= {
        name: (HIDDEN,) for name in ("norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm")
    }
    arrays = {name: rng.standard_normal(shape) * 0.05 for name, shape in shapes.items()}
    for name, shape in {"gate": (INNER, HIDDEN), "up": (INNER, HIDDEN), "down": (HIDDEN, INNER)}.items():
        random: Any = (rng.standard_normal(shape) * 0.05).astype(ml_dtypes.bfloat16)
        arrays |= {f"layers.0.mlp.experts.{i}.{name}_proj": random + i % 3 for i in range(EXPERTS)}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config.to_dict() | {"model_type": "qwen3_moe"}))
    stored = {f"model.{name}.weight": array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    safetensors.numpy.save_file(stored, directory / "model.safetensors")
    return directory


def test_experts_are_in_memory_one_at_a_time(tmp_path: Path) -> None:
    taken = compile_measured(experts(tmp_path / "moe"), tmp_path / "m.octavo", "bf16", ["v3"])
    print(f"experts: {taken}")
    assert taken.peak_bytes < 300 * MEGABYTE < EXPERTS * 2 * INNER * HIDDEN * 2
