"""The class that a configuration is made into, where transformers lists it under that of a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

from compiler.checkpoint import open_checkpoint
from compiler.importers.choose import choose_model
from compiler.importers.configuration import read_config
from compiler.importers.refused import ImportRefused

TEXT = dict(
    vocab_size=131, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip


def emu3(text: dict[str, Any]) -> Any:
    return transformers.AutoConfig.for_model("emu3", text_config=text, vocabulary_map={"a": 1})


def test_a_text_part_that_is_stored_alone(tmp_path: Path) -> None:
    config: Any = transformers.AutoConfig.for_model("emu3_text_model", **TEXT)
    transformers.Emu3ForCausalLM(config).save_pretrained(tmp_path)
    stored, _ = open_checkpoint(tmp_path)
    model, names = choose_model(read_config(tmp_path), stored.names)
    assert type(model) is transformers.Emu3ForCausalLM
    assert names.plain.keys() == model.state_dict().keys()


def test_the_text_class_of_a_whole_is_made_of_its_text() -> None:
    model, _ = choose_model(emu3(TEXT), ())
    assert type(model) is transformers.Emu3ForCausalLM and model.config.num_hidden_layers == 2


@pytest.mark.parametrize(
    "named", [["BertModel"], ["LlamaForCausalLM"], ["os"], [["a"]], "Emu3ForCausalLM", None]
)
def test_a_class_of_another_configuration_is_not_taken(named: Any) -> None:
    config = transformers.AutoConfig.for_model("emu3_text_model", **TEXT)
    config.architectures = named
    with pytest.raises(ImportRefused, match="no causal language model for the model type 'emu3_text_model'"):
        choose_model(config, ())
