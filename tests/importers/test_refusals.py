"""What cannot be imported soundly is refused, with the reason and where."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from compiler.importers import ImportRefused, load
from compiler.weights import WeightError
from tests.model import tiny


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.save("llama", tmp_path)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_remote_code_is_never_run(checkpoint: Path) -> None:
    (checkpoint / "modeling_mine.py").write_text("raise SystemExit('this ran')")
    edit_config(checkpoint, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    with pytest.raises(ImportRefused, match="its own model code"):
        load(checkpoint)


def test_an_unknown_model_type_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, model_type="nobody_knows_this")
    with pytest.raises(ImportRefused, match="transformers does not know this model"):
        load(checkpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": "wide"},
        {"hidden_size": -96},
        {"num_attention_heads": 0},
        {"hidden_act": "nobody_knows_this"},
        {"rope_parameters": {"rope_type": "nobody_knows_this"}},
        {"model_type": ["llama"]},
        {"max_position_embeddings": 10**12},
        {"quantization_config": [1]},
    ],
    ids=str,
)
def test_a_wrong_field_is_refused_on_one_line(checkpoint: Path, changes: dict[str, Any]) -> None:
    edit_config(checkpoint, **changes)
    with pytest.raises(ImportRefused, match=r"^[^\n]*(config\.json|quantised)[^\n]*$"):
        load(checkpoint)


def test_what_changes_with_the_length_names_the_longest_context_without_it(tmp_path: Path) -> None:
    """Attention that drops keys once there are more than 20."""
    config = transformers.DogeConfig(
        vocab_size=tiny.VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=tiny.CONTEXT, keep_window_size=20, num_experts=4,
    )  # fmt: skip
    transformers.DogeForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ImportRefused, match=r"does not hold at length 21\..* compile with --max-context 20"):
        load(tmp_path)
    assert load(tmp_path, max_context=20).info.max_context == 20


def test_token_ids_that_are_none_are_refused_or_left_out(checkpoint: Path) -> None:
    generation = checkpoint / "generation_config.json"
    generation.write_text('{"eos_token_id": [3, 10000, -1]}')
    assert load(checkpoint).info.eos_token_ids == (3, 2)  # 2 is the configuration's own
    generation.write_text('{"eos_token_id": [3, "x"]}')
    with pytest.raises(ImportRefused, match="eos_token_id is .*; they are token ids"):
        load(checkpoint)


def test_a_configuration_that_nests_too_deep_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(ImportRefused, match="not valid JSON"):
        load(checkpoint)


def test_a_checkpoint_quantised_by_an_unknown_method_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    with pytest.raises(ImportRefused, match=r"quantised \(bitsandbytes\): gptq, awq, compressed-tensors are"):
        load(checkpoint)


def test_a_model_without_a_language_head_is_refused(checkpoint: Path) -> None:
    (checkpoint / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(ImportRefused, match="no causal language model for the model type 'vit'"):
        load(checkpoint)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_broken_configuration_is_refused(checkpoint: Path, content: str | None) -> None:
    path = checkpoint / "config.json"
    path.unlink()
    if content is not None:
        path.write_text(content)
    with pytest.raises(ImportRefused, match="config.json"):
        load(checkpoint)


def test_a_path_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(ImportRefused, match="neither a checkpoint directory nor a .gguf or .onnx file"):
        load(tmp_path / "model.bin")


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightError, match="model.layers.1.mlp.up_proj.weight"):
        load(checkpoint)


def test_a_tensor_of_another_shape_is_named(checkpoint: Path) -> None:
    edit_config(checkpoint, intermediate_size=80)
    with pytest.raises(
        WeightError, match=r"gate_proj.weight': it has shape \[112, 96\] but .* makes it \[80, 96\]"
    ):
        load(checkpoint)


def test_stored_tensors_that_are_not_read_are_listed(checkpoint: Path) -> None:
    edit_weights(checkpoint, lambda t: t.update({"extra.weight": torch.zeros(2)}))
    assert load(checkpoint).info.unused == ("extra.weight",)


def test_a_context_beyond_the_position_table_is_refused(tmp_path: Path) -> None:
    tiny.save("opt", tmp_path)  # its table has two rows before position 0
    assert load(tmp_path, max_context=tiny.CONTEXT).info.max_context == tiny.CONTEXT
    with pytest.raises(ImportRefused, match=f"has {tiny.CONTEXT + 2} rows.*--max-context {tiny.CONTEXT} "):
        load(tmp_path, max_context=tiny.CONTEXT + 1)


def test_rotary_positions_have_no_table(checkpoint: Path) -> None:
    assert load(checkpoint, max_context=4 * tiny.CONTEXT).graph.dims == {"S": (1, 4 * tiny.CONTEXT)}


def test_an_attention_argument_without_a_meaning_is_refused(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.models.llama import modeling_llama

    original = modeling_llama.LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs, new_idea=3)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(ImportRefused, match="layers.0.self_attn: attention takes the argument 'new_idea'"):
        load(checkpoint)


class Between(nn.Module):
    """An embedding, something, a head."""

    def __init__(self, something: Callable[[Any], Any]) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.something = something

    def forward(self, ids: Any) -> Any:
        return self.head(self.something(self.tokens(ids)))


@pytest.mark.parametrize(
    ("something", "message"),
    [
        (lambda x: x.sort(-1)[0], "aten.sort.default"),
        (lambda x: x * math.log(x.shape[1]), r"test_refusals.py, line \d+.*Eq\("),
        (lambda x: x if x.shape[1] < 5 else 2 * x, r"test_refusals.py, line \d+.*does not hold at length"),
        (lambda x: x if x.shape[1] == 1 else 2 * x, r"test_refusals.py, line.*does not hold at length 1\."),
        (
            lambda x: x if x.sum() > 0 else 2 * x,
            r"test_refusals.py, line \d+, in .*: torch.export cannot trace it: it branches on",
        ),
        (lambda x: x[:, :8], "the minimum of 8 and S"),
        (lambda x: nn.functional.dropout(x, 0.5, training=True), "dropout is active"),
    ],
)
def test_what_cannot_be_imported_is_named(something: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ImportRefused, match=message):
        load(Between(something), max_context=64)


def test_an_unsupported_op_is_refused_where_it_is() -> None:
    class Inner(nn.Module):
        def forward(self, x: Any) -> Any:
            return x.cummax(-1)[0]

    with pytest.raises(ImportRefused, match=r"aten\.cummax\.default in something \(File .*test_refusals.py"):
        load(Between(Inner()), max_context=64)


def test_a_module_must_say_how_long_its_sequences_may_be() -> None:
    with pytest.raises(ImportRefused, match="Give max_context"):
        load(Between(lambda x: x))


def test_a_module_that_needs_more_than_positions_is_refused() -> None:
    class More(nn.Module):
        def forward(self, ids: Any, pos: Any, images: Any) -> Any:
            return ids

    with pytest.raises(ImportRefused, match="needs 'images' besides ids and positions"):
        load(More(), max_context=64)


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(ImportRefused, match="cannot import a int"):
        load(3)


def test_a_path_that_is_not_there_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ImportRefused, match="does not exist"):
        load(tmp_path / "nowhere")


def test_an_op_of_the_model_itself_is_placed_by_its_source_line() -> None:
    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens = torch.nn.Embedding(11, 4)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.tokens(ids).cumsum(1)

    (op,) = (op for op in load(Pooled(), max_context=16).graph.ops if op.kind == "cumsum")
    assert re.fullmatch(r"test_refusals\.py:\d+", op.loc)
