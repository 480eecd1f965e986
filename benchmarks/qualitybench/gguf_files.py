"""A Hugging Face directory (llama, qwen3_moe, mamba) as a GGUF file, which llama.cpp quantises and runs."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    TensorNameMap,
    get_tensor_name_map,
)
from safetensors import safe_open

Array = np.ndarray[Any, np.dtype[Any]]

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen3_moe": MODEL_ARCH.QWEN3MOE,
    "mamba": MODEL_ARCH.MAMBA,
}
EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def write(directory: Path, path: Path, like: Path | None = None) -> None:
    """The weights of `directory` (config.json, *.safetensors) as `path`, float32; float16 matrices stay so.

    like: a GGUF file of the same model, which gives the metadata, tokenizer included; without it there is no
    vocabulary in the file. Raises ValueError for other models.
    """
    config = json.loads((directory / "config.json").read_text())
    arch = ARCHITECTURES.get(config["model_type"])
    if arch is None:
        *first, last = ARCHITECTURES
        known = f"{', '.join(first)} and {last}"
        raise ValueError(f"{directory}: a {config['model_type']} model; only names of {known} are known here")
    writer = GGUFWriter(path, MODEL_ARCH_NAMES[arch])
    if like is None:
        (_add_recurrent_shape if arch == MODEL_ARCH.MAMBA else _add_shape)(writer, config)
        writer.add_vocab_size(config["vocab_size"])
        writer.add_tokenizer_model("none")
    else:
        _add_metadata(writer, like)
    for name, array in _tensors(directory, config, arch):
        stored = "F16" if array.dtype == np.float16 else "F32"
        writer.add_tensor(name, array, raw_dtype=GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_metadata(writer: GGUFWriter, like: Path) -> None:
    for name, field in GGUFReader(like).fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value = int(LlamaFileType.ALL_F32) if name == "general.file_type" else field.contents()
        writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)


def _add_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base((config.get("rope_parameters") or config)["rope_theta"])
    size = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(size)
    if "num_experts" in config:
        writer.add_key_length(size)
        writer.add_value_length(size)
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_recurrent_shape(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_context_length(2**20)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(config["layer_norm_epsilon"])
    writer.add_ssm_conv_kernel(config["conv_kernel"])
    writer.add_ssm_inner_size(config["intermediate_size"])
    writer.add_ssm_state_size(config["state_size"])
    writer.add_ssm_time_step_rank(config["time_step_rank"])


def _tensors(directory: Path, config: dict[str, Any], arch: MODEL_ARCH) -> Iterator[tuple[str, Array]]:
    """Every tensor under GGUF's name: a stack for the experts of a layer, which are all in one file."""
    names = get_tensor_name_map(arch, config["num_hidden_layers"])
    heads: dict[str, int] = {}
    if arch == MODEL_ARCH.LLAMA:
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for stem, keys in _stacks(tensors.keys()).items():
                arrays = [_stored(tensors.get_tensor(key)) for key in keys]
                array = np.stack(arrays) if EXPERT.match(keys[0]) else arrays[0]
                count = heads.get(stem.rpartition(".")[2])
                array = array if count is None else pairs(array, count)
                yield _gguf_name(stem, names), _RECURRENT.get(stem.rpartition(".")[2], lambda x: x)(array)


def _gguf_name(stem: str, names: TensorNameMap) -> str:
    """Of a bias too; a recurrence's own vectors have no ending."""
    if stem.endswith(".bias"):
        return f"{names.get_name(stem.removesuffix('.bias'))}.bias"
    return f"{names.get_name(stem)}" + ("" if stem.endswith((".A_log", ".D")) else ".weight")


_RECURRENT: dict[str, Callable[[Array], Array]] = {
    "A_log": lambda x: -np.exp(x.astype(np.float32)), "conv1d": lambda x: x[:, 0].astype(np.float32),
}  # fmt: skip


def _stacks(keys: Iterable[str]) -> dict[str, list[str]]:
    """Names of arrays by the name that GGUF knows them under, experts in order."""
    found: defaultdict[str, dict[int, str]] = defaultdict(dict)
    for key in keys:
        expert = EXPERT.match(key)
        stem = key if expert is None else f"{expert[1]}.{expert[3]}"
        found[stem.removesuffix(".weight")][0 if expert is None else int(expert[2])] = key
    return {stem: [numbered[i] for i in sorted(numbered)] for stem, numbered in found.items()}


def _stored(array: Array) -> Array:
    return array if array.dtype == np.float16 and array.ndim > 1 else array.astype(np.float32, copy=False)


def pairs(weight: Array, heads: int) -> Array:
    """Rows [heads * D, K] with the two halves that a rotation mixes in turn, as GGUF's llama has them."""
    size = weight.shape[0] // heads
    return weight.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(weight.shape)
