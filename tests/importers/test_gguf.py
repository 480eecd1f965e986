"""GGUF files, written here as llama.cpp lays them out, import to graphs that give the model's logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Quant

from compiler.importers import Imported, ImportRefused, load
from compiler.weights import WeightError
from ir.types import DType
from tests.importers.compare import TOLERANCE, worst

HIDDEN, HEADS, KV_HEADS, LAYERS, CONTEXT, FFN = 96, 6, 2, 2, 64, 128
TOKENS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()) + ["he", "ll", "<s>", "</s>"]
VOCAB = len(TOKENS)

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def build(tied: bool = False) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        initializer_range=0.1,
        tie_word_embeddings=tied,
    )
    return transformers.LlamaForCausalLM(config).eval()


def interleaved(weight: Any, heads: int) -> Any:
    """Rows of each head as llama.cpp has them: the two halves of the rotary pairs alternate."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def stored(model: Any) -> dict[str, Any]:
    """The model's arrays under GGUF's names, in GGUF's layout."""
    found = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
    }
    if not model.config.tie_word_embeddings:
        found["output.weight"] = model.lm_head.weight
    for i, layer in enumerate(model.model.layers):
        for own, name in NAMES.items():
            found[f"blk.{i}.{name}.weight"] = layer.get_submodule(own).weight
    arrays = {name: tensor.detach().numpy() for name, tensor in found.items()}
    for i in range(LAYERS):
        for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
            key = f"blk.{i}.{name}.weight"
            arrays[key] = interleaved(arrays[key], heads)
    return arrays


def write(path: Path, arrays: dict[str, Any], quant: Quant, **extra: str) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(TOKENS)
    writer.add_token_types([1] * (VOCAB - 2) + [3, 3])
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(VOCAB - 2)
    writer.add_eos_token_id(VOCAB - 1)
    for key, value in extra.items():
        writer.add_string(key.replace("__", "."), value)
    for name, array in arrays.items():
        kind = quant if array.ndim == 2 else Quant.F32
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_model_it_was_made_from(tmp_path: Path, tied: bool) -> None:
    model = build(tied)
    imported = load(write(tmp_path / "m.gguf", stored(model), Quant.F32))
    assert max(worst(imported, model, length, VOCAB) for length in (1, 16, 33)) <= TOLERANCE


def made_by_transformers(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module", params=[Quant.F16, Quant.BF16, Quant.Q8_0, Quant.Q4_1], ids=lambda q: q.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Imported]:
    path = write(tmp_path_factory.mktemp("gguf") / "m.gguf", stored(build()), request.param)
    return made_by_transformers(path), load(path)


def test_logits_are_those_of_transformers(case: tuple[Any, Imported]) -> None:
    model, imported = case
    assert max(worst(imported, model, length, VOCAB) for length in (1, 33)) <= TOLERANCE


def test_rows_are_those_of_transformers_whatever_their_order(case: tuple[Any, Imported]) -> None:
    model, imported = case
    state = model.state_dict()
    for weight in imported.graph.weights:
        if weight.name not in state or state[weight.name].ndim != 2:
            continue
        expected = state[weight.name].numpy()
        for lo, hi in ((0, expected.shape[0]), (3, 20), (5, 6), (7, 7)):
            found = imported.weights.rows(weight.name, lo, hi)
            assert np.array_equal(found.astype(np.float32), expected[lo:hi]), (weight.name, lo, hi)


def test_unquantised_arrays_keep_their_element_type(tmp_path: Path) -> None:
    imported = load(write(tmp_path / "m.gguf", stored(build()), Quant.BF16))
    assert imported.weights.type("model.layers.0.mlp.up_proj.weight").dtype is DType.BF16
    assert imported.weights.type("model.norm.weight").dtype is DType.F32


def test_the_tokenizer_and_its_ids_come_along(case: tuple[Any, Imported]) -> None:
    imported = case[1]
    assert imported.info.bos_token_id == VOCAB - 2 and imported.info.eos_token_ids == (VOCAB - 1,)
    assert imported.info.max_context == CONTEXT and imported.info.source_kind == "gguf"
    tokenizer = tokenizers.Tokenizer.from_str(imported.tokenizer_files["tokenizer.json"].decode())
    ids = tokenizer.encode("hello", add_special_tokens=False).ids
    assert [TOKENS[i] for i in ids] == ["he", "ll", "o"]
    assert json.loads(imported.tokenizer_files["tokenizer_config.json"])


def test_a_tensor_that_transformers_would_ignore_is_refused(tmp_path: Path) -> None:
    arrays = stored(build()) | {"blk.0.attn_q_norm.weight": np.ones(8, np.float32)}
    with pytest.raises(ImportRefused, match="no place for tensor 'blk.0.attn_q_norm.weight'"):
        load(write(tmp_path / "m.gguf", arrays, Quant.F32))


def test_rotary_frequencies_are_divided_by_what_the_file_says(tmp_path: Path) -> None:
    """As llama.cpp's converter stores a llama3 rotary embedding."""
    plain, scaling = build(), dict(
        rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )  # fmt: skip
    config = transformers.LlamaConfig.from_dict(plain.config.to_dict() | {"rope_parameters": scaling})
    model = transformers.LlamaForCausalLM(config).eval()
    model.load_state_dict(plain.state_dict())
    divisors = (plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq).numpy()
    assert divisors.max() > 7 and divisors.min() < 1.01
    imported = load(write(tmp_path / "m.gguf", stored(plain) | {"rope_freqs.weight": divisors}, Quant.F32))
    assert max(worst(imported, model, length, VOCAB) for length in (1, 17, 60)) <= TOLERANCE
    assert worst(imported, plain, 60, VOCAB) > 100 * TOLERANCE
    with pytest.raises(ImportRefused, match="scales 3 rotary frequencies, and the model has 8"):
        load(write(tmp_path / "n.gguf", stored(plain) | {"rope_freqs.weight": divisors[:3]}, Quant.F32))


def test_scaled_rotary_embeddings_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", stored(build()), Quant.F32, llama__rope__scaling__type="yarn")
    with pytest.raises(ImportRefused, match="llama.rope.scaling.type is 'yarn'"):
        load(path)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    arrays = stored(build())
    del arrays["blk.1.ffn_up.weight"]
    with pytest.raises(WeightError, match="model.layers.1.mlp.up_proj.weight"):
        load(write(tmp_path / "m.gguf", arrays, Quant.F32))


@pytest.mark.parametrize("keep", [2, 200, 100_000])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write(tmp_path / "m.gguf", stored(build()), Quant.F32)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(WeightError, match="m.gguf: (truncated|.* too few for a GGUF file)"):
        load(path)
