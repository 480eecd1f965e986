"""Queries that pick the keys that they look at: all keys, where no more are there, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compiler.importers import ImportRefused, load
from tests.importers.compare import TOLERANCE, worst
from tests.model import tiny

CONTEXT = 40
_COMMON = dict(
    vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, max_position_embeddings=CONTEXT, initializer_range=0.3, pad_token_id=0,
    bos_token_id=1, eos_token_id=2, index_n_heads=2, index_head_dim=16,
)  # fmt: skip
_LATENT = dict(
    q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=12,
    mlp_layer_types=["dense", "dense"],
)  # fmt: skip

FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # enough picks, and one too few
    "keys": ("glm_moe_dsa", _LATENT | dict(index_topk=CONTEXT), dict(index_topk=CONTEXT - 1)),
    "keys beside sinks": ("hy_v4", _LATENT | dict(index_topk=CONTEXT), dict(index_topk=CONTEXT - 1)),
    "blocks": (
        "minimax_m3_vl_text",
        dict(
            head_dim=16, layer_types=["minimax_m3_sparse", "full_attention"], index_block_size=8,
            index_topk_blocks=5, num_experts_per_tok=2, num_local_experts=4, mlp_layer_types=["dense"] * 2,
        ),
        dict(index_topk_blocks=4),
    ),
}  # fmt: skip


def build(kind: str, changes: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **(_COMMON | changes))
    model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tiny.randomize(model)
    return model.eval().float()


@pytest.mark.parametrize("name", FORMS)
def test_all_keys_are_seen_where_as_many_are_picked(tmp_path: Path, name: str) -> None:
    kind, changes, _ = FORMS[name]
    model = build(kind, changes)
    model.save_pretrained(tmp_path)
    imported = load(tmp_path)
    assert any("look at all keys" in text for text in imported.info.frozen.values())
    assert max(worst(imported, model, n, tiny.VOCAB) for n in (1, 17, CONTEXT)) <= TOLERANCE


@pytest.mark.parametrize("name", FORMS)
def test_fewer_picks_than_keys_are_refused_with_the_context_that_is_right(tmp_path: Path, name: str) -> None:
    kind, changes, fewer = FORMS[name]
    build(kind, changes | fewer).save_pretrained(tmp_path)
    with pytest.raises(ImportRefused, match=r"indexer picks the .*--max-context \d+ or less") as error:
        load(tmp_path)
    most = int(str(error.value).partition("--max-context ")[2].split()[0])
    assert load(tmp_path, max_context=most).info.max_context == most
