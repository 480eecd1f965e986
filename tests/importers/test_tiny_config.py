"""Tiny configurations are found by the fields of their classes, and their models run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from compiler.explanation.coverage import COMPILES, REFUSED, cover, row_of
from compiler.importers import ImportRefused
from compiler.importers.installed import model_types, tiny_config, write_tiny
from compiler.importers.tiny_config import CONTEXT, VOCAB_SIZE, WINDOW, fields, sizes


def test_sizes_are_small_and_one_layer_of_each_kind_is_there() -> None:
    config = tiny_config("gemma3_text")
    assert config.vocab_size == VOCAB_SIZE and config.max_position_embeddings == CONTEXT
    assert config.sliding_window == WINDOW
    assert config.layer_types == ["sliding_attention", "full_attention"] and config.num_hidden_layers == 2


@pytest.mark.parametrize("name", ["hunyuan_v1_dense", "dots1", "emu3", "zaya", "gpt_neo", "gemma4_text"])
def test_what_a_class_leaves_open_is_filled_where_its_model_needs_it(name: str) -> None:
    assert tiny_config(name).get_text_config(decoder=True).num_hidden_layers in (2, 4)


class Unknown(PreTrainedConfig):
    """Of a version that is not written yet: names as others have them, and some that are new."""

    model_type = "unknown"
    attribute_map = {"num_experts": "num_local_experts"}

    def __init__(
        self, hidden_size: int = 8192, num_local_experts: int = 256, curl: int = 7, **rest: Any
    ) -> None:
        super().__init__(**rest)
        self.hidden_size, self.num_local_experts, self.curl = hidden_size, num_local_experts, curl


def test_a_class_that_is_not_known_gets_sizes_by_its_fields() -> None:
    assert {"hidden_size", "num_local_experts", "curl"} <= set(fields(Unknown))
    found = sizes(Unknown())
    assert (found["hidden_size"], found["num_local_experts"]) == (64, 4)
    assert "curl" not in found and "num_experts" not in found


def test_a_type_without_a_tiny_model_says_why() -> None:
    with pytest.raises(ImportRefused, match="no tiny model can be made of it: .* parameters"):
        tiny_config("blt")


def test_a_tiny_checkpoint_is_a_configuration_alone(tmp_path: Path) -> None:
    write_tiny("llama", tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 64


def test_a_recurrence_compiles_and_a_loop_over_the_sequence_is_refused_as_state() -> None:
    row = row_of("bamba")
    assert (row.outcome, row.attention) == (COMPILES, ())
    assert row.recurrences == ("tokens up to 3 back", "a decay of each head")
    row = row_of("rwkv")
    assert (row.outcome, row.state) == (REFUSED, True)
    assert row.op == "aten.zeros_like.default" and row.module.startswith("rwkv.blocks.0.")
    assert "needs state beyond keys and values" in row.reason


def test_rows_come_in_the_order_that_was_asked_for() -> None:
    found = cover(["qwen3", "gpt2"], workers=2)
    assert [(row.model_type, row.outcome) for row in found.rows] == [("qwen3", COMPILES), ("gpt2", COMPILES)]
    assert found.rows[0].attention == ("causal",) and len(model_types()) > 100
