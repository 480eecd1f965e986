"""Small valid configurations of many architectures, and what no configuration should hold."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz import mutate

_LLAMA: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
_GPT2 = {"vocab_size": 131, "n_embd": 48, "n_head": 3, "n_layer": 2, "n_positions": 128}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_KINDS = ["full_attention", "sliding_attention"]
_DEEPSEEK = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16}
_DEEPSEEK |= {"v_head_dim": 16, "n_routed_experts": 4, "moe_intermediate_size": 16, "n_group": 2}
_DEEPSEEK |= {"topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 3}
_VISION = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
_VISION |= {"patch_size": 14, "intermediate_size": 32}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA | {"sliding_window": 12, "head_dim": 16},
    "qwen2": _LLAMA | {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    "qwen3": _LLAMA | {"head_dim": 16, "layer_types": _KINDS},
    "gemma2": _LLAMA | {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24},
    "gemma3_text": _LLAMA | {"head_dim": 16, "sliding_window": 12, "layer_types": _KINDS},
    "gemma3": {"text_config": _LLAMA | {"head_dim": 16}, "vision_config": _VISION, "mm_tokens_per_image": 4},
    "llava": {"text_config": _LLAMA | {"model_type": "llama"}, "vision_config": _VISION},
    "phi": _LLAMA | {"num_key_value_heads": 3, "partial_rotary_factor": 0.5},
    "phi3": _LLAMA | {"original_max_position_embeddings": 64},
    "gpt2": _GPT2,
    "gpt_neox": _LLAMA | {"rotary_pct": 0.25},
    "gptj": _GPT2 | {"rotary_dim": 8},
    "gpt_bigcode": _GPT2,
    "opt": _LLAMA | {"ffn_dim": 56, "word_embed_proj_dim": 48},
    "bloom": {"vocab_size": 131, "hidden_size": 48, "n_head": 3, "n_layer": 2, "seq_length": 128},
    "falcon": _LLAMA | {"alibi": False, "new_decoder_architecture": True},
    "mpt": {"vocab_size": 131, "d_model": 48, "n_heads": 3, "n_layers": 2, "max_seq_len": 128},
    "mixtral": _LLAMA | _EXPERTS,
    "qwen3_moe": _LLAMA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "gpt_oss": _LLAMA | _EXPERTS | {"head_dim": 16, "layer_types": _KINDS},
    "deepseek_v3": _LLAMA | _DEEPSEEK,
    "mamba": {"vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 2, "state_size": 4},
    "t5": {"vocab_size": 131, "d_model": 48, "d_kv": 16, "num_layers": 2, "num_heads": 3},
}
BASES = tuple({"model_type": name, "architectures": ["X"], **fields} for name, fields in _MODELS.items())

ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 1e4},
    {"rope_type": "linear", "factor": 2.0},
    {"type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32},
    {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "factor": 2.0},
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2}},
    {"rope_type": "__class__", "factor": 1},
)
_MODEL_TYPES = (
    "nobody_knows",
    "",
    "../x",
    "llama",
    "bert",
    "gemma3",
    "t5",
    "mamba",
    "vit",
    "whisper",
    "auto",
)
EXTRAS: dict[str, tuple[Any, ...]] = {
    "auto_map": ({"AutoConfig": "configuration.Evil"}, {"AutoModelForCausalLM": "o/r--modeling.Evil"}, [], 1),
    "quantization_config": (
        *({"quant_method": m, "bits": 4} for m in ("gptq", "awq", "bitsandbytes", "fp8", "x", 7, None)),
        *({"load_in_4bit": True}, [], {}, "gptq", [1]),
        *(
            {"quant_method": m, "bits": 4, "group_size": n}
            for m in ("gptq", "awq")
            for n in (32, -1, 2**70, [])
        ),
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}},
        },
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": [], "format": {}}}},
    ),
    "model_type": (*_MODEL_TYPES, None, 7, ["llama"], {"a": "llama"}),
    "num_labels": (0, -1, 3, 10**5, 10**9, 2**70, "7", None, 1.5),
    "id2label": ({}, {"0": "a"}, {"x": 1}, [1], "ab", {str(i): i for i in range(5000)}),
    "layer_types": (["full_attention"] * 2, ["x"], ["sliding_attention"] * 5000, "full", [1], {}),
    "num_hidden_layers": (0, 1, -1, 700, 4096, 10**9, 2.0, "2", None, [2], True),
    "num_local_experts": (0, 1, 700, 4096, 10**9, -4),
    "max_position_embeddings": (0, -1, 2**20, 2**28, 2**31 - 1, 10**12, 128.0, "128", None),
    "n_positions": (0, -1, 2**20, 2**28, 2**31 - 1, 10**12, 128.0, None),
    "vocab_size": (0, -1, 2**31 - 1, 2**40, 131.5, None, "131"),
    "_attn_implementation": ("flash_attention_2", "kernels-community/x", "o/r:evil", "eager", 1, {}),
    "attn_implementation": ("flash_attention_3", "o/r", {"": "o/r"}),
    "_experts_implementation": ("o/r", "grouped_mm", 1),
    "_name_or_path": ("o/r", "/etc/passwd", "\x1b[31m", 5),
    "torch_dtype": ("float16", "os.system", "float33", 1, None, {"a": "float16"}),
    "dtype": ("bfloat16", "auto", "load", "__class__", [], 1.0),
    "architectures": (["LlamaForCausalLM"], ["os.system"], "x", [], None, [[1]], ["\x1b[31m"]),
    "hidden_act": ("gelu_new", "os.system", "__class__", "", None, 1, ["silu"]),
    "text_config": ({}, None, 1, "x", [], {"model_type": "llama"}, {"model_type": "gemma3"}, _LLAMA),
    "vision_config": ({}, None, 1, {"model_type": "x"}),
    "decoder": ({"model_type": "llama"}, 1, {}),
    "backbone_config": ({"model_type": "resnet"}, 1),
    "use_kernels": (True, "x"),
    "transformers_version": ("99.0.0", 1, "x"),
    "trust_remote_code": (True,),
    "pruned_heads": ({"0": [1]}, {"x": 1}, [1]),
    "is_encoder_decoder": (True, 1),
    "base_model_tp_plan": ({"*": "x"}, 1),
    "partial_rotary_factor": (0, -1, 1e9, 1e-9, float("nan"), "x"),
    "rope_theta": (0, -1, 1e308, float("inf"), "x", None),
}


def hostile(rng: Random, key: str, old: Any) -> Any:
    """In a field's place: of its own kind and absurd, or of another."""
    if key in EXTRAS and rng.random() < 0.4:
        return rng.choice(EXTRAS[key])
    if isinstance(old, str):
        return mutate.text(rng, old) if rng.random() < 0.5 else rng.choice(mutate.TEXTS)
    if isinstance(old, int | float) and rng.random() < 0.6:
        return rng.choice((0, -1, 1, 7, 2 * old, 0.5 * old, -old, 513, 5000, 2**20, mutate.integer(rng)))
    return mutate.nested(rng, old) if rng.random() < 0.3 else mutate.value(rng)
