"""A llama, a qwen3_moe or a mamba with random weights: a Hugging Face directory and the same as a GGUF file.

For speeds at sizes that no checkpoint is at hand for. By default a llama of 1.1 billion weights: 4.4 GB on
disk in all.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from safetensors.numpy import save_file

from qualitybench import gguf_files

Shapes = dict[str, tuple[int, ...]]


def command(
    folder: Annotated[Path, typer.Argument(help="Gets NAME/ and NAME.gguf.")],
    name: Annotated[str, typer.Option()] = "llama-1.1b",
    layers: Annotated[int, typer.Option(min=1)] = 22,
    hidden: Annotated[int, typer.Option()] = 2048,
    heads: Annotated[int, typer.Option()] = 32,
    kv_heads: Annotated[int, typer.Option()] = 4,
    intermediate: Annotated[int, typer.Option(help="Inner width, of an expert where there are some.")] = 5632,
    experts: Annotated[int, typer.Option(help="0: a llama.", min=0)] = 0,
    state: Annotated[int, typer.Option(help="Size of a mamba's state; 0: a llama.", min=0)] = 0,
    chosen: Annotated[int, typer.Option(help="Experts of a token.", min=1)] = 8,
    vocab: Annotated[int, typer.Option()] = 32000,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Write both, float16."""
    directory = folder / name
    directory.mkdir(parents=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16",
        "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "vocab_size": vocab, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if experts:
        config |= {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": hidden // heads,
            "num_experts": experts, "num_experts_per_tok": chosen, "moe_intermediate_size": intermediate,
            "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
        }  # fmt: skip
    if state:
        config = {
            "architectures": ["MambaForCausalLM"], "model_type": "mamba", "dtype": "float16",
            "hidden_size": hidden, "intermediate_size": 2 * hidden, "expand": 2, "state_size": state,
            "conv_kernel": 4, "time_step_rank": -(-hidden // 16), "num_hidden_layers": layers,
            "vocab_size": vocab, "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
            "bos_token_id": 1, "eos_token_id": 2,
        }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    rng, index = np.random.default_rng(seed), {}
    for part, shapes in (_mamba_parts if state else _parts)(config).items():
        tensors = {_file_name(tensor): _random(rng, shape) for tensor, shape in shapes.items()}
        save_file(tensors, directory / f"{part}.safetensors", metadata={"format": "pt"})
        index |= dict.fromkeys(tensors, f"{part}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    gguf_files.write(directory, folder / f"{name}.gguf")


def _parts(config: dict[str, Any]) -> dict[str, Shapes]:
    """A file for each layer, and one for the rest."""
    hidden, size = config["hidden_size"], config["hidden_size"] // config["num_attention_heads"]
    narrow = size * config["num_key_value_heads"]
    layer = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden), "self_attn.o_proj": (hidden, hidden),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,), **_mlp(config),
    }  # fmt: skip
    if "num_experts" in config:
        layer |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    table = (config["vocab_size"], hidden)
    parts: dict[str, Shapes] = {
        "rest": {"model.embed_tokens": table, "lm_head": table, "model.norm": (hidden,)}
    }
    for i in range(config["num_hidden_layers"]):
        parts[f"layer-{i}"] = {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return parts


def _mamba_parts(config: dict[str, Any]) -> dict[str, Shapes]:
    hidden, inner, state = config["hidden_size"], config["intermediate_size"], config["state_size"]
    rank = config["time_step_rank"]
    layer = {
        "norm": (hidden,), "mixer.in_proj": (2 * inner, hidden), "mixer.out_proj": (hidden, inner),
        "mixer.conv1d": (inner, 1, config["conv_kernel"]), "mixer.conv1d.bias": (inner,),
        "mixer.x_proj": (rank + 2 * state, inner), "mixer.dt_proj": (inner, rank),
        "mixer.dt_proj.bias": (inner,), "mixer.A_log": (inner, state), "mixer.D": (inner,),
    }  # fmt: skip
    rest: Shapes = {"backbone.embeddings": (config["vocab_size"], hidden), "backbone.norm_f": (hidden,)}
    layers = {
        f"layer-{i}": {f"backbone.layers.{i}.{name}": shape for name, shape in layer.items()}
        for i in range(config["num_hidden_layers"])
    }
    return {"rest": rest, **layers}


def _file_name(tensor: str) -> str:
    return tensor if tensor.endswith((".bias", ".A_log", ".D")) else f"{tensor}.weight"


def _mlp(config: dict[str, Any]) -> Shapes:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    block = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    if "num_experts" not in config:
        return {f"mlp.{name}": shape for name, shape in block.items()}
    experts = config["num_experts"]
    each = {f"mlp.experts.{e}.{name}": shape for e in range(experts) for name, shape in block.items()}
    return {"mlp.gate": (experts, hidden), **each}


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray[Any, np.dtype[np.float16]]:
    """Matrices that keep a vector's size; norms of ones."""
    if len(shape) == 1:
        return np.ones(shape, np.float16)
    return (rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5).astype(np.float16)


if __name__ == "__main__":
    typer.run(command)
