"""Explanations of what was traced: a configuration alone, and a module with a mistake."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import compiler
from compiler.importers import ImportRefused
from tests.model import tiny


class Competing(nn.Module):
    def forward(self, x: Any) -> Any:
        return x + torch.softmax(x, dim=1)


def test_a_configuration_is_enough(tmp_path: Path) -> None:
    config = tiny.CONFIGS["gemma2"] | {"num_hidden_layers": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gemma2"}))
    found = compiler.explain(tmp_path, dtype="bf16")
    assert found.refused is None
    attentions = [b.attentions[0] for b in found.layers if b.index is not None]
    assert [a.window for a in attentions] == [config["sliding_window"], None]
    for a in attentions:
        assert (a.query_heads, a.kv_heads) == (config["num_attention_heads"], 1)
        assert (a.head_size, a.scale) == (config["head_dim"], config["query_pre_attn_scalar"] ** -0.5)
    assert found.kv_bytes_per_token == 2 * 2 * 1 * config["head_dim"] * 2
    assert list(found.model.tied) == ["model.embed_tokens.weight"]
    assert found.model.config["sliding_window"] == tiny.WINDOW


def test_a_model_that_names_no_context_is_refused_for_what_its_graph_is(tmp_path: Path) -> None:
    small = {"hidden_size": 32, "num_heads": 2, "num_blocks": 1, "chunk_size": 4, "vocab_size": 9}
    config = {"model_type": "xlstm", "num_hidden_layers": 1, **small}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = compiler.explain(tmp_path).refused
    assert refused is not None
    assert refused.reason.startswith("a loop over the sequence, such as a recurrence, needs state beyond")
    assert "modeling_xlstm.py, line" in refused.line
    assert refused.op.startswith("aten.") and refused.module.startswith("backbone.blocks.0.")


class Averaging(nn.Module):
    """A running average, as a loop that reads what it wrote."""

    def forward(self, x: Any) -> Any:
        kept, found = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            kept = 0.9 * kept + x[:, t]
            found.append(kept)
        return torch.stack(found, 1)


def test_a_loop_over_the_sequence_is_named_as_state_at_its_line() -> None:
    with pytest.raises(
        ImportRefused, match="a loop over the sequence, .* needs state beyond keys"
    ) as refused:
        compiler.explain(tiny.build_plain(mix=Averaging()), max_context=tiny.CONTEXT)
    line = inspect.getsourcelines(Averaging)[1] + 5
    assert refused.value.op == "aten.mul.Tensor" and refused.value.module == "mix"
    assert f"{Path(__file__).name}, line {line}, in forward" in str(refused.value)


def test_a_module_that_mixes_tokens_is_refused_at_its_line() -> None:
    refused = compiler.explain(tiny.build_plain(mix=Competing()), max_context=tiny.CONTEXT).refused
    assert refused is not None
    assert (refused.reason, refused.module) == (
        "softmax runs along the tokens",
        "mix",
    )
    line = inspect.getsourcelines(Competing)[1] + 2
    assert f"{Path(__file__).name}, line {line}, in forward" in refused.line


class Ahead(nn.Module):
    """Each token gets the mean of itself and what comes after it."""

    def forward(self, x: Any) -> Any:
        weights = torch.ones(x.shape[1], x.shape[1], device=x.device).triu()
        return weights @ x / weights.sum(-1, keepdim=True)


def test_a_refusal_says_why_a_matrix_of_positions_is_no_recurrence() -> None:
    refused = compiler.explain(tiny.build_plain(mix=Ahead()), max_context=tiny.CONTEXT).refused
    assert refused is not None and refused.module == "mix"
    assert "a matrix weights later keys" in [missed.reason for missed in refused.because]


class Mixed(nn.Module):
    """A shift and a running sum."""

    def forward(self, x: Any) -> Any:
        return x + nn.functional.pad(x, (0, 0, 2, -2)).tanh() + x.cumsum(1).tanh()


def test_shifts_and_recurrences_are_said() -> None:
    text = str(compiler.explain(tiny.build_plain(mix=Mixed()), max_context=tiny.CONTEXT))
    assert "  shift        96 channels of the tokens 2 back, KV group " in text
    assert "  recurrence   1 head of 1 x 96, a decay of each head\n" in text
    assert "  state        group " in text
