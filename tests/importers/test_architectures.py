"""Checkpoints of many architectures import to graphs that give transformers' logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compiler.importers import Imported, load
from ir.text import parse, print_graph
from ir.types import DType, Tensor
from tests.importers.compare import TOLERANCE, worst
from tests.model import tiny

LENGTHS = (1, 15, 16, 17, 70)
WINDOW = 12

# Each architecture as the shared tiny configuration has it, and ones with what that leaves out.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in tiny.CONFIGS},
    "llama untied, biased": (
        "llama",
        dict(tie_word_embeddings=False, attention_bias=True, mlp_bias=True),
    ),
    "mistral tied": ("mistral", dict(tie_word_embeddings=True)),
    "qwen2 tied, sliding": (
        "qwen2",
        dict(tie_word_embeddings=True, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    "qwen3 untied": ("qwen3", dict(tie_word_embeddings=False)),
    "phi with normed heads": ("phi", dict(qk_layernorm=True)),
    "phi3 tied, sliding": ("phi3", dict(tie_word_embeddings=True, sliding_window=WINDOW)),
    "gpt2 with other scales": (
        "gpt2",
        dict(scale_attn_by_inverse_layer_idx=True, activation_function="gelu"),
    ),
    "opt after norm": ("opt", dict(do_layer_norm_before=False, tie_word_embeddings=True)),
    "gpt_neox in sequence": ("gpt_neox", dict(use_parallel_residual=False, tie_word_embeddings=True)),
    "stablelm in parallel": (
        "stablelm",
        dict(use_parallel_residual=True, qk_layernorm=True, tie_word_embeddings=True),
    ),
    "cohere with normed heads": ("cohere", dict(use_qk_norm=True)),
    "starcoder2 sliding": ("starcoder2", dict(sliding_window=WINDOW, tie_word_embeddings=True)),
}


def build(variant: str) -> Any:
    name, changes = VARIANTS[variant]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **(tiny.CONFIGS[name] | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tiny.randomize(model)
    return model.eval().float()


@pytest.fixture(scope="module", params=VARIANTS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Imported]:
    model = build(request.param)
    directory = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory)
    return model, load(directory)


def test_logits_are_those_of_transformers(case: tuple[Any, Imported]) -> None:
    model, imported = case
    errors = {length: worst(imported, model, length, tiny.VOCAB) for length in LENGTHS}
    assert max(errors.values()) <= TOLERANCE, errors


def test_each_layer_has_one_attention_with_its_mask_to_be_proved(case: tuple[Any, Imported]) -> None:
    model, imported = case
    found = [op for op in imported.graph.ops if op.kind == "attention"]
    assert len(found) == model.config.num_hidden_layers
    for op in found:
        assert op.args[3] is not None and op.args[3].type.dtype is DType.BOOL
        assert op.attr("mask") is None
        assert any(part.isdigit() for part in op.loc.split("."))


def test_the_graph_has_the_imported_form(case: tuple[Any, Imported]) -> None:
    graph = case[1].graph
    text = print_graph(graph)
    assert print_graph(parse(text)) == text
    assert [v.name for v in graph.inputs] == ["ids", "pos"]
    assert [v.name for v in graph.outputs] == ["logits"]
    assert isinstance(graph.outputs[0].type, Tensor) and graph.outputs[0].type.rank == 3
    assert graph.dims == {"S": (1, tiny.CONTEXT)}


def test_every_stored_array_is_read(case: tuple[Any, Imported]) -> None:
    assert case[1].info.unused == ()


def test_a_wrong_mask_is_seen(tmp_path: Path) -> None:
    """The comparison can fail: a window that is off by one key is far beyond the tolerance."""
    model = build("mistral")
    model.save_pretrained(tmp_path)
    imported = load(tmp_path)
    model.config.sliding_window += 1
    assert worst(imported, model, 70, tiny.VOCAB) > 10 * TOLERANCE


def test_attention_code_of_a_models_own_stays_plain_ops(tmp_path: Path) -> None:
    """A model that ignores the attention interface is exported again, with its own code."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=tiny.VOCAB, hidden_size=48, n_layer=2, n_head=3)
    model = transformers.BloomForCausalLM(config).eval()
    tiny.randomize(model)
    model.save_pretrained(tmp_path)
    imported = load(tmp_path, max_context=64)
    kinds = [op.kind for op in imported.graph.ops]
    assert kinds.count("attention") == 0 and kinds.count("softmax") == 2
    assert max(worst(imported, model, length, tiny.VOCAB) for length in (1, 16, 33)) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "rope", "length"),
    [
        ("llama", dict(rope_type="dynamic", factor=2.0, rope_theta=10000.0), 96),
        (
            "phi3",
            dict(
                rope_type="longrope",
                rope_theta=10000.0,
                short_factor=[1.0 + 0.1 * i for i in range(16)],
                long_factor=[2.0 + 0.3 * i for i in range(16)],
            ),
            90,
        ),
    ],
)
def test_rotary_embeddings_that_switch_on_length_are_frozen(
    name: str, rope: dict[str, Any], length: int, tmp_path: Path
) -> None:
    changes: dict[str, Any] = dict(rope_parameters=rope)
    if name == "phi3":
        changes["original_max_position_embeddings"] = 32
    else:
        changes["max_position_embeddings"] = 32
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **(tiny.CONFIGS[name] | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    imported = load(tmp_path, max_context=length)
    assert len(imported.info.frozen) == 1 and f"length of {length}" in next(
        iter(imported.info.frozen.values())
    )
    assert worst(imported, model, length, tiny.VOCAB) <= TOLERANCE


def test_computed_buffers_in_old_checkpoints_are_not_read(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "model.rotary_emb.inv_freq": torch.zeros(16)}, path)
    imported = load(tmp_path)
    assert imported.info.unused == ("model.rotary_emb.inv_freq",)
    assert worst(imported, model, 17, tiny.VOCAB) <= TOLERANCE


def test_nothing_is_left_in_transformers(tmp_path: Path) -> None:
    from transformers import masking_utils
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    before = masking_utils.find_packed_sequence_indices
    tiny.save("gpt2", tmp_path)
    first, second = load(tmp_path), load(tmp_path)
    assert print_graph(first.graph) == print_graph(second.graph)
    assert masking_utils.find_packed_sequence_indices is before
    assert "octavo" not in AttentionInterface._global_mapping
    assert "octavo" not in AttentionMaskInterface._global_mapping
    assert not hasattr(torch.ops.octavo, "attention")


def test_bfloat16_checkpoints_are_computed_in_float32(tmp_path: Path) -> None:
    build("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    )
    imported = load(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    assert imported.weights.type(name).dtype is DType.BF16
    assert all(w.type.dtype is DType.F32 for w in imported.graph.weights)
    assert worst(imported, model, 17, tiny.VOCAB) <= TOLERANCE
