"""Tiny configurations of the causal language models that the installed transformers has.

A configuration class says by its fields what its model is made of; each field whose name is known here gets
a small size, all others keep the class's default. So a model type that is new is there without a change.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

CONTEXT = 128
VOCAB_SIZE = 131
WINDOW = 11  # below most lengths, and no multiple of a block

_WIDTH = ("hidden_size", "n_embd", "d_model", "n_embed", "emb_dim", "dim", "model_dim",
          "embedding_size", "d_embed", "decoder_hidden_size", "lru_width", "word_embed_proj_dim")  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers",
           "num_decoder_layers", "num_encoder_layers")  # fmt: skip
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads",
          "encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
          "swa_num_attention_heads")  # fmt: skip
_KV_HEADS = ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "swa_num_key_value_heads",
             "num_global_key_value_heads")  # fmt: skip
_HEAD_SIZE = ("head_dim", "kv_channels", "attention_head_dim", "swa_head_dim", "global_head_dim",
              "v_head_dim", "swa_v_head_dim", "qk_nope_head_dim", "index_head_dim",
              "linear_key_head_dim", "linear_value_head_dim", "mamba_d_head", "mamba_head_dim")  # fmt: skip
_INNER = ("intermediate_size", "n_inner", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size",
          "d_inner", "dff", "dim_ff", "d_ff", "intermediate_size_mlp", "block_ff_dim",
          "dense_intermediate_size")  # fmt: skip
_EXPERT_INNER = ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size",
                 "moe_shared_expert_intermediate_size", "shared_intermediate_size")  # fmt: skip
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts")
_ONE = ("n_shared_experts", "num_shared_experts", "n_group", "topk_group", "num_expert_group",
        "num_limited_groups", "mamba_n_groups", "n_groups", "mamba_ngroups", "first_k_dense_replace",
        "moe_layer_start_index", "num_dense_layers", "expand", "mamba_expand", "attn_layer_offset",
        "expert_layer_offset")  # fmt: skip
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "max_sequence_length",
              "model_max_length")  # fmt: skip
_WINDOWS = ("sliding_window", "attention_window_size", "local_window_size", "window_size",
            "sliding_window_size", "attention_chunk_size")  # fmt: skip
_STATES = ("state_size", "ssm_state_size", "mamba_d_state")
_PAIRS = ("n_mamba_heads", "linear_num_key_heads", "index_n_heads", "no_rope_layer_interval",
          "attn_layer_period", "expert_layer_period")  # fmt: skip
_FOURS = ("mamba_dt_rank", "time_step_rank", "mamba_chunk_size", "chunk_size", "conv_kernel", "mamba_d_conv",
          "linear_num_value_heads", "linear_conv_kernel_dim", "index_topk", "mamba_n_heads",
          "mamba_num_heads")  # fmt: skip

# None: the class computes it, or does without.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(_WIDTH, 64),
    **dict.fromkeys(_LAYERS, 2),
    **dict.fromkeys(_HEADS, 4),
    **dict.fromkeys(_KV_HEADS, 2),
    **dict.fromkeys(_HEAD_SIZE, 16),
    **dict.fromkeys(_INNER, 96),
    **dict.fromkeys(_EXPERT_INNER, 32),
    **dict.fromkeys(_EXPERTS, 4),
    **dict.fromkeys(_CHOSEN, 2),
    **dict.fromkeys(_ONE, 1),
    **dict.fromkeys(_POSITIONS, CONTEXT),
    **dict.fromkeys(_WINDOWS, WINDOW),
    **dict.fromkeys(_STATES, 8),
    **dict.fromkeys(_PAIRS, 2),
    **dict.fromkeys(_FOURS, 4),
    "vocab_size": VOCAB_SIZE,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "unpadded_vocab_size": VOCAB_SIZE,
    "mamba_d_ssm": 64,
    "attn_layer_indices": [1],
    "hidden_size_per_layer_input": 8,
    "laurel_rank": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_head_dim": 24,
    "rotary_dim": 8,
    "axial_pos_shape": (4, 32),
    "axial_pos_embds_dim": (32, 32),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "is_decoder": True,
    "use_cache": False,
}
# Of a class that leaves these open although its model needs them.
_OPEN = frozenset(("head_dim", "num_key_value_heads", "n_shared_experts", *_EXPERTS, *_CHOSEN))


@dataclass(frozen=True)
class Variant:
    """fills: fields to give a size where the class has none. left_out: fields to leave as they are. longer:
    one layer more, of the last kind."""

    fills: frozenset[str] = frozenset()
    left_out: frozenset[str] = frozenset()
    longer: int = 0


# In the order in which they are tried: not all sizes fit all models.
VARIANTS = (
    Variant(),
    Variant(fills=_OPEN),
    Variant(longer=1),
    Variant(left_out=frozenset({"layer_types"})),
    Variant(left_out=frozenset(_HEAD_SIZE)),
)


def tiny_configs(config_class: Any, changes: Mapping[str, Any] | None = None) -> Iterator[Any]:
    """Configurations of a class, the likeliest first. changes: fields to set otherwise.

    Raises whatever the class raises of its own defaults, or where no variant suits it.
    """
    default, why = config_class(), list[Exception]()
    for variant in VARIANTS:
        try:
            yield config_class(**sizes(default, variant) | dict(changes or {}))
        except Exception as error:  # whatever checks a configuration class makes of its fields
            why.append(error)
    if len(why) == len(VARIANTS):
        raise why[0]


def sizes(default: Any, variant: Variant = VARIANTS[0]) -> dict[str, Any]:
    """The fields of a configuration that are not left as its class has them."""
    found = {
        name: value
        for name in fields(type(default))
        if name in SIZES and name not in variant.left_out
        if (value := _size(name, default, variant)) is not None
    }
    for name in getattr(default, "sub_configs", None) or {}:
        part = getattr(default, name, None)
        if part is not None:
            found[name] = {**sizes(part, variant), "model_type": part.model_type}
    return found | _layers(default, found, variant)


def _size(name: str, default: Any, variant: Variant) -> Any:
    """None: it stays as it is."""
    there, size = _field(default, name), SIZES[name]
    if there is None:
        return size if name in variant.fills else None
    if isinstance(there, list) and not isinstance(size, tuple | list):
        return size if name in _INNER else 2 if name == "eos_token_id" else None
    if name in _KV_HEADS:
        return _kv_heads(there, default)
    if name == "head_dim" and there == _field(default, "qk_rope_head_dim"):
        return SIZES["qk_rope_head_dim"]
    return min(there, size) if name in _CHOSEN else size


def _field(default: Any, name: str) -> Any:
    """A field's value; where it differs between layers, the class's own."""
    try:
        return getattr(default, name)
    except Exception:  # some refuse to say what is not the same in every layer
        return getattr(type(default), name, None)


def _kv_heads(there: Any, default: Any) -> int:
    """As many as query heads, one, or some, as the class has it."""
    heads = next((n for n in (_field(default, name) for name in _HEADS) if type(n) is int), None)
    return SIZES[_HEADS[0]] if there == heads else min(there, SIZES["num_key_value_heads"])


def _layers(default: Any, found: Mapping[str, Any], variant: Variant) -> dict[str, Any]:
    """One layer of each kind that the class has; two of a kind that is the only one.

    Where some layers read others' keys and values, twice as many, of which the second half does.
    """
    if isinstance(pairs := _field(default, "attention_types"), list):  # [[kinds, how often], ...]
        return {"attention_types": [[list(kinds), 1] for kinds, _ in pairs]}
    every, shares = _field(default, "layer_types"), _field(default, "num_kv_shared_layers")
    if not isinstance(every, list) or not every or "layer_types" in variant.left_out:
        return {}
    kinds = _once(every)
    made: dict[str, Any] = {"num_kv_shared_layers": len(kinds)} if shares else {}
    if _is_settable(type(default), "layer_types"):
        made["layer_types"] = kinds * (2 if shares else 1) + kinds[-1:] * variant.longer
        count = len(made["layer_types"])
    else:
        count = max(every.index(kind) for kind in kinds) + 1
    made |= {name: count for name in _LAYERS if name in found}
    for name in ("mlp_layer_types", "moe_layer_freq"):
        if isinstance(there := _field(default, name), list) and there:
            made[name] = (_once(there) * count)[:count]
    return made


def _once(kinds: Sequence[Any]) -> list[Any]:
    found = list(dict.fromkeys(kinds))
    return found * 2 if len(found) == 1 else found


def fields(config_class: Any) -> tuple[str, ...]:
    """The names that a class takes, without those that stand for another of its own."""
    taken = inspect.signature(config_class).parameters
    declared = getattr(config_class, "__dataclass_fields__", {})
    names = dict.fromkeys((*taken, *declared))
    renamed: Mapping[str, str] = getattr(config_class, "attribute_map", None) or {}
    return tuple(n for n in names if renamed.get(n) not in names and _is_settable(config_class, n))


def _is_settable(config_class: Any, name: str) -> bool:
    found = inspect.getattr_static(config_class, name, None)
    return not isinstance(found, property) or found.fset is not None
