"""A llama's Hugging Face directory as a GGUF file, which llama.cpp quantises and runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import (
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
)
from safetensors import safe_open

Array = np.ndarray[Any, np.dtype[Any]]


def write(directory: Path, path: Path, like: Path | None = None) -> None:
    """The weights of `directory` (config.json, *.safetensors) as `path`, float32; float16 matrices stay so.

    like: a GGUF file of the same model, which gives the metadata, tokenizer included; without it there is no
    vocabulary in the file. Raises ValueError for what is no llama.
    """
    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"{directory}: a {config['model_type']} model; only llama's names are known here")
    writer = GGUFWriter(path, "llama")
    if like is None:
        _add_shape(writer, config)
    else:
        _add_metadata(writer, like)
    for name, array in _tensors(directory, config):
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
    writer.add_rope_dimension_count(config["hidden_size"] // config["num_attention_heads"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")


def _tensors(directory: Path, config: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    """Every tensor under GGUF's name."""
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "np") as tensors:
            for name in tensors.keys():
                stem = name.removesuffix(".weight")
                array = tensors.get_tensor(name)
                if array.dtype != np.float16 or array.ndim == 1:
                    array = array.astype(np.float32, copy=False)
                count = heads.get(stem.rpartition(".")[2])
                yield f"{names.get_name(stem)}.weight", array if count is None else pairs(array, count)


def pairs(weight: Array, heads: int) -> Array:
    """Rows [heads * D, K] with the two halves that a rotation mixes in turn, as GGUF's llama has them."""
    size = weight.shape[0] // heads
    return weight.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(weight.shape)
