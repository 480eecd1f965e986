"""Mixtures of experts import to graphs of moe_linear that give transformers' logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from compiler.importers import Imported, load
from compiler.importers.refused import ImportRefused
from compiler.pipeline import pipeline
from compiler.weights import read_as
from ir.dims import symbol
from ir.graph import Graph
from passes.page_kv import PageKv
from tests.importers.compare import TOLERANCE, worst
from tests.model import tiny

LENGTHS = (1, 15, 16, 17, 70)

_SIZES: dict[str, Any] = dict(
    vocab_size=tiny.VOCAB, hidden_size=64, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=tiny.CONTEXT, initializer_range=0.2,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, num_experts_per_tok=2,
)  # fmt: skip
_LATENT = dict(
    head_dim=8, num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8,
    qk_nope_head_dim=16, v_head_dim=16,
)  # fmt: skip

# What each is there for: a router or experts of a kind that no other here has.
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=5),  # softmax of the chosen
    "qwen2_moe": dict(num_experts=5, moe_intermediate_size=24, shared_expert_intermediate_size=32),
    "gpt_oss": dict(num_local_experts=5, sliding_window=8),  # transposed, biased, interleaved, clamped
    "deepseek_v3": dict(
        n_routed_experts=8, n_group=4, topk_group=2, moe_intermediate_size=24, first_k_dense_replace=1,
        **_LATENT,
    ),  # groups, and a bias for choosing alone
    "granitemoeshared": dict(num_local_experts=5, shared_intermediate_size=32),
    "jetmoe": dict(num_local_experts=5, kv_channels=16, num_attention_heads=4),  # sorted by expert, twice
    "llama4_text": dict(
        num_local_experts=5, num_experts_per_tok=2, intermediate_size_mlp=48, moe_layers=[0, 1]
    ),  # every expert on every token
}  # fmt: skip
MIXTURES = {"deepseek_v3": 1, "jetmoe": 4}  # two unless said


def build(name: str, seed: int = 0, **changes: Any) -> Any:
    config = transformers.AutoConfig.for_model(name, **(_SIZES | CONFIGS[name] | changes))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tiny.randomize(model)
    with torch.no_grad():  # of a padding token whose row is zero all experts' scores are equal
        model.get_input_embeddings().weight[0].normal_(std=0.2)
    for buffer_name, buffer in model.named_buffers():
        if "bias" in buffer_name:
            buffer.add_(torch.randn_like(buffer) * 0.2)
    return model.eval().float()


def kinds(imported: Imported) -> list[str]:
    return [op.kind for op in imported.graph.ops]


def before_paging(imported: Imported) -> Graph:
    weights = {w.name: w for w in imported.graph.weights}
    graph = imported.graph
    for step in pipeline(read=lambda name: read_as(imported.weights, weights[name])):
        if isinstance(step, PageKv):
            return graph
        graph = step.run(graph).graph
    raise AssertionError("there is no page_kv")


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(name: str) -> None:
    model = build(name)
    imported = load(model, max_context=tiny.CONTEXT)
    errors = {length: worst(imported, model, length, tiny.VOCAB) for length in LENGTHS}
    assert max(errors.values()) <= TOLERANCE, errors
    assert kinds(imported).count("attention") == 2
    mixtures, chosen = MIXTURES.get(name, 2), before_paging(imported)
    assert [op.kind for op in chosen.ops].count("moe_linear") == 2 * mixtures
    assert worst(replace(imported, graph=chosen), model, 33, tiny.VOCAB) <= TOLERANCE
    linears = [op for op in PageKv().run(chosen).graph.ops if op.kind == "moe_linear"]
    assert [op.args[2].type.shape for op in linears] == [(symbol("T"), 2)] * 2 * mixtures  # type: ignore[union-attr]


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_whatever_computed_the_experts_before_does_so_again(experts: str) -> None:
    model = build("mixtral")
    model.set_experts_implementation(experts)
    registered = dict(ALL_EXPERTS_FUNCTIONS)
    imported = load(model, max_context=tiny.CONTEXT)
    assert kinds(imported).count("moe_linear") == 4
    assert model.config._experts_implementation == experts and dict(ALL_EXPERTS_FUNCTIONS) == registered
    assert "get_interface" not in vars(ALL_EXPERTS_FUNCTIONS)
    assert worst(imported, model, 17, tiny.VOCAB) <= TOLERANCE


def test_another_seed_chooses_other_experts() -> None:
    """The comparison sees routing: with one model's weights the other model's logits are far off."""
    imported = load(build("mixtral", seed=1), max_context=tiny.CONTEXT)
    assert worst(imported, build("mixtral", seed=1), 17, tiny.VOCAB) <= TOLERANCE
    assert worst(imported, build("mixtral", seed=2), 17, tiny.VOCAB) > 0.1


def test_experts_shared_out_among_devices_are_refused() -> None:
    model = build("mixtral")
    model.model.layers[1].mlp.experts._is_expert_parallel = True
    with pytest.raises(ImportRefused, match="Load the model for one device"):
        load(model, max_context=tiny.CONTEXT)


class Sorting(nn.Module):
    """A mixture whose rows are sorted by expert, one linear each; `spoil` makes one step another."""

    def __init__(self, spoil: str = "", biased: bool = False, stacked: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spoil, self.count, self.slots = spoil, 5, 2
        self.embed = nn.Embedding(tiny.VOCAB, 16)
        self.router = nn.Linear(16, self.count)
        self.experts = nn.ModuleList(nn.Linear(16, tiny.VOCAB, bias=biased) for _ in range(self.count))
        self.stack = nn.Parameter(torch.randn(self.count, tiny.VOCAB, 16)) if stacked else None

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids).view(-1, 16)
        values, experts = self.router(x).topk(self.slots, dim=-1)
        counted = values.abs().long() if self.spoil == "counts" else experts
        ones = torch.zeros(x.shape[0], self.count).scatter(1, counted % self.count, 1)
        if self.spoil != "counts":
            ones = torch.zeros(x.shape[0], self.count).scatter(1, experts, 1)
        counts = ones.long().sum(0).tolist()
        counts = counts[::-1] if self.spoil == "reversed counts" else counts
        order = experts.flatten().sort(0)[1]
        tokens = order.div(3 if self.spoil == "tokens" else self.slots, rounding_mode="trunc")
        parts = x[tokens].split(counts, dim=0)
        which = [1, 0, 2, 3, 4] if self.spoil == "parts" else range(self.count)
        if self.stack is not None:
            y = [nn.functional.linear(parts[i], self.stack[i]) for i in which]
        else:
            y = [self.experts[i](parts[i]) for i in which]
        rows = torch.cat(y).tanh() * values.softmax(-1).flatten()[order][:, None]
        rows = rows[1:] if self.spoil == "rows" else rows
        back = torch.zeros(x.shape[0], tiny.VOCAB)
        return back.index_add(0, tokens[1:] if self.spoil == "rows" else tokens, rows)[None]


@pytest.mark.parametrize("options", [{}, {"biased": True}, {"stacked": True}])
def test_rows_that_are_sorted_by_expert_are_put_back(options: dict[str, Any]) -> None:
    model = Sorting(**options).eval()
    imported = load(model, max_context=tiny.CONTEXT)
    assert kinds(imported).count("moe_linear") == 1
    assert max(worst(imported, model, n, tiny.VOCAB) for n in LENGTHS) <= TOLERANCE


@pytest.mark.parametrize("spoil", ["counts", "reversed counts", "tokens", "parts", "rows"])
def test_rows_that_are_sorted_otherwise_are_refused(spoil: str) -> None:
    with pytest.raises(ImportRefused):
        load(Sorting(spoil).eval(), max_context=tiny.CONTEXT)


def test_keys_that_are_rotated_after_they_are_repeated() -> None:
    """Six heads of keys then, and two of values."""
    sizes = dict(vocab_size=tiny.VOCAB, hidden_size=48, num_hidden_layers=1, num_attention_heads=6)
    grouped = dict(new_decoder_architecture=True, num_kv_heads=2, alibi=False)
    config = transformers.AutoConfig.for_model("falcon", **sizes, **grouped)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    imported = load(model, max_context=tiny.CONTEXT)
    graph = before_paging(imported)
    assert [op.kind for op in graph.ops].count("attention") == 1
    assert worst(replace(imported, graph=graph), model, 17, tiny.VOCAB) <= TOLERANCE
