"""Tiny random models of many architectures, made with transformers, and one written with plain matmuls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import compiler

VOCAB = 131
CONTEXT = 128
ISA = ["v3"]  # one level is enough here, and it builds fastest
WINDOW = 12  # below most prompts, and no multiple of the block

_DECODER = dict(
    vocab_size=VOCAB,
    hidden_size=96,
    intermediate_size=112,
    num_hidden_layers=2,
    num_attention_heads=3,
    num_key_value_heads=1,
    max_position_embeddings=CONTEXT,
    initializer_range=0.1,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)

CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _DECODER | dict(tie_word_embeddings=True),
    "mistral": _DECODER | dict(sliding_window=WINDOW, head_dim=32),
    "qwen2": _DECODER | dict(hidden_size=160, num_attention_heads=5, num_hidden_layers=3),
    "qwen3": _DECODER | dict(head_dim=64, tie_word_embeddings=True),
    "gemma": _DECODER | dict(head_dim=48, tie_word_embeddings=True),
    "gemma2": _DECODER
    | dict(head_dim=32, sliding_window=WINDOW, num_hidden_layers=4, query_pre_attn_scalar=24)
    | dict(tie_word_embeddings=True),
    "phi": _DECODER | dict(num_key_value_heads=3, partial_rotary_factor=0.5),
    "phi3": _DECODER | dict(num_attention_heads=9, num_key_value_heads=3, hidden_size=288),
    "olmo2": _DECODER | dict(num_key_value_heads=3),
    "gpt2": dict(
        vocab_size=VOCAB,
        n_embd=96,
        n_head=3,
        n_layer=2,
        n_positions=CONTEXT,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=True,
    ),
    "opt": dict(
        vocab_size=VOCAB,
        hidden_size=96,
        word_embed_proj_dim=96,
        ffn_dim=112,
        num_attention_heads=3,
        num_hidden_layers=2,
        max_position_embeddings=CONTEXT,
        init_std=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    ),
    "gpt_neox": dict(
        vocab_size=VOCAB,
        hidden_size=160,
        intermediate_size=112,
        num_attention_heads=5,
        num_hidden_layers=2,
        max_position_embeddings=CONTEXT,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
    ),
    "stablelm": _DECODER | dict(use_qkv_bias=True),
    "granite": _DECODER
    | dict(attention_multiplier=0.2, embedding_multiplier=3.0, residual_multiplier=0.5, logits_scaling=2.0),
    "cohere": _DECODER | dict(num_key_value_heads=3, logit_scale=0.25, tie_word_embeddings=True),
    "starcoder2": _DECODER | dict(sliding_window=None, use_bias=True),
}


def build(name: str) -> transformers.PreTrainedModel:
    """A float32 model in eval mode whose every parameter is random, norm weights and biases too."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomize(model)
    return model.eval().float()


def randomize(model: nn.Module) -> None:
    """Move vectors (norm weights, biases) off the ones and zeros that they start as."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)


def save(name: str, directory: Path) -> Path:
    build(name).save_pretrained(directory)
    return directory


def compiled(source: Any, out: Path, max_context: int = CONTEXT, **options: Any) -> Path:
    """An artifact for one ISA level, its C++ built without -O3: in half the time, and it runs for a moment.

    tests/codegen runs every kernel as it is built for users, test_schedules and test_greedy whole models.
    """
    build: Any = import_module("codegen.cpp.build")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", [flag for flag in build.FLAGS if flag != "-O3"])
        return compiler.compile(source, out, max_context=max_context, isa=ISA, **options)


Mask = Callable[[int, torch.device], torch.Tensor]  # length -> [S, S], true where a query must not look


def causal(length: int, device: torch.device) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).triu(1)


class PlainAttention(nn.Module):
    """Attention as people write it: matmul, mask, softmax, matmul."""

    def __init__(self, hidden: int, heads: int, mask: Mask) -> None:
        super().__init__()
        self.heads, self.head_size, self.mask = heads, hidden // heads, mask
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [B, S, hidden]
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, self.head_size).transpose(1, 2)
            for part in self.qkv(x).split(hidden, dim=-1)
        )
        scores = q @ k.transpose(-2, -1) / self.head_size**0.5
        probs = scores.masked_fill(self.mask(length, x.device), float("-inf")).softmax(dim=-1)
        return self.out((probs @ v).transpose(1, 2).reshape(batch, length, hidden))


class PlainLM(nn.Module):
    """A small GPT with learned positions. masks: of each layer. mix: a module after the embedding."""

    def __init__(
        self, masks: Sequence[Mask], mix: nn.Module | None = None, hidden: int = 96, heads: int = 3
    ) -> None:
        super().__init__()
        layers = range(len(masks))
        self.tokens = nn.Embedding(VOCAB, hidden)
        self.positions = nn.Embedding(CONTEXT, hidden)
        self.mix = mix or nn.Identity()
        self.attention = nn.ModuleList(PlainAttention(hidden, heads, mask) for mask in masks)
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in (*layers, *layers))
        self.up = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in layers)
        self.down = nn.ModuleList(nn.Linear(2 * hidden, hidden) for _ in layers)
        self.head = nn.Linear(hidden, VOCAB, bias=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # [B, S] -> [B, S, V]
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        x = self.mix(x)
        for i, attention in enumerate(self.attention):
            x = x + attention(self.norms[2 * i](x))
            x = x + self.down[i](nn.functional.gelu(self.up[i](self.norms[2 * i + 1](x))))
        return self.head(x)


def build_plain(*masks: Mask, mix: nn.Module | None = None) -> PlainLM:
    """masks: of each layer, or one of both of two layers."""
    torch.manual_seed(0)
    model = PlainLM(masks if len(masks) > 1 else (masks or (causal,)) * 2, mix)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
        for norm in model.norms:
            norm.weight.add_(1.0)
    return model.eval()


def reference_logits(model: nn.Module, ids: list[int]) -> torch.Tensor:
    """Float32 logits [S, V] of one sequence, in one forward without a cache."""
    with torch.no_grad():
        out = model(torch.tensor([ids]))
    return (out if isinstance(out, torch.Tensor) else out.logits)[0].float()
