"""Modules and checkpoints in the many forms that people have them in import to the same logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from compiler.importers import Imported, load
from compiler.weights import read_as
from tests.importers.compare import TOLERANCE, worst
from tests.model import tiny

LENGTHS = (1, 2, 17, 33)


def agree(source: Any, reference: Any) -> Imported:
    imported = load(source, max_context=tiny.CONTEXT)
    errors = {n: worst(imported, reference, n, tiny.VOCAB) for n in LENGTHS}
    assert max(errors.values()) <= TOLERANCE, errors
    return imported


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model


class ByKeyword(Wrapped):
    def forward(self, *, input_ids: Any) -> Any:
        return {"logits": self.model(input_ids), "hidden": None}


class AnyArguments(Wrapped):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs), None


class LikeTransformers(Wrapped):
    def forward(
        self, input_ids: Any, attention_mask: Any = None, position_ids: Any = None, use_cache: bool = True
    ) -> Any:
        assert not use_cache and attention_mask is None
        return CausalLMOutput(logits=self.model(input_ids))


class KeywordPositions(Wrapped):
    def forward(self, x: Any, *, positions: Any) -> Any:
        return self.model(x) * (1.0 + 0.0 * positions[..., None])


@pytest.mark.parametrize("form", [ByKeyword, AnyArguments, LikeTransformers, KeywordPositions])
def test_forwards_of_any_signature(form: type[Wrapped]) -> None:
    model = tiny.build_plain()
    agree(form(model), model)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2", "opt"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_models_of_transformers_in_memory(name: str, attention: str) -> None:
    model = tiny.build(name)
    model.set_attn_implementation(attention)
    imported = agree(model, model)
    assert [op.kind for op in imported.graph.ops].count("attention") == 2
    assert model.config._attn_implementation == attention


class Spread(Wrapped):
    """Variances, and the quantile of a normal distribution at a fixed share."""

    def forward(self, ids: Any) -> Any:
        y = self.model(ids)
        quantile = torch.erfinv(2 * torch.full((), 0.95) - 1) * 2**0.5
        above = y - y.mean(-1, keepdim=True) - quantile * y.std(-1, keepdim=True, unbiased=False)
        return above + y.var(-1, keepdim=True) * y.std(dim=(2,), keepdim=True)


def test_variances() -> None:
    model = Spread(tiny.build_plain())
    agree(model, model)


class OwnHead(nn.Module):
    """A body of transformers' under a head of one's own."""

    def __init__(self) -> None:
        super().__init__()
        whole: Any = tiny.build("qwen2")
        self.model, self.lm_head = whole.model, whole.lm_head

    def forward(self, ids: Any) -> Any:
        return self.lm_head(self.model(input_ids=ids, use_cache=False).last_hidden_state) / 2


def test_a_part_of_a_model_of_transformers() -> None:
    model = OwnHead().eval()
    agree(model, model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_module_is_computed_in_float32_from_its_own_values(dtype: torch.dtype) -> None:
    model = tiny.build_plain().to(dtype)
    before = {name: (id(t), t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    imported = agree(model, tiny.build_plain().to(dtype).float())
    after = model.state_dict(keep_vars=True)
    assert all(id(after[n]) == i and torch.equal(after[n], t) for n, (i, t) in before.items())
    weight = next(w for w in imported.graph.weights if w.name == "up.0.weight")
    assert np.array_equal(
        read_as(imported.weights, weight), before["up.0.weight"][1].detach().float().numpy()
    )


def test_a_number_kept_as_a_half_precision_buffer() -> None:
    class Scaled(Wrapped):
        def __init__(self) -> None:
            super().__init__(tiny.build_plain())
            self.register_buffer("scale", torch.tensor(1.5))

        def forward(self, ids: Any) -> Any:
            return self.model(ids) * self.scale

    agree(Scaled().half(), Scaled().half().float())


def test_lists_and_several_tensors_as_indices() -> None:
    class Indexed(Wrapped):
        def __init__(self) -> None:
            super().__init__(tiny.build_plain())
            self.register_buffer("table", torch.randn(3, 5, tiny.VOCAB))

        def forward(self, ids: Any) -> Any:
            pos = torch.arange(ids.shape[1])
            some = self.table[pos % 3, pos % 5 - 2]  # negative: from the end
            across = self.table[pos % 3, :, torch.arange(1)]  # [S, 5]: an index before and after an axis
            return self.model(ids) + some + across.sum(-1, keepdim=True)

    torch.manual_seed(1)
    model = Indexed().eval()
    agree(model, model)


def test_writes_into_new_tensors() -> None:
    class Written(Wrapped):
        def forward(self, ids: Any) -> Any:
            logits = self.model(ids)
            out = torch.empty_like(logits)
            out[..., :40] = logits[..., :40].expm1()
            out[..., 40:] = logits[..., 40:]
            out[..., -1] = 2.0
            out[out < -1.5] = -1.5
            return out

    model = Written(tiny.build_plain())
    agree(model, model)


def test_the_greatest_and_the_least_and_where_they_are() -> None:
    class Extremes(nn.Module):
        """Of integers, of which several are equal."""

        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.head = nn.Embedding(tiny.VOCAB, 24), nn.Linear(24, tiny.VOCAB)

        def forward(self, ids: Any) -> Any:
            x = (2 * self.tokens(ids)).floor().reshape(*ids.shape, 4, 6)
            (top, at), (low, where) = x.max(-1, keepdim=True), x.min(2)
            least = torch.stack([ids, ids % 7, -ids], -1).min(-1)[1]  # of integers
            x = x * top + low.unsqueeze(2) - 0.5 * at + 0.25 * where.unsqueeze(2)
            x = (
                x.clamp(min=low.unsqueeze(2), max=top)
                + 0.1 * x.argmax(2, keepdim=True)
                - 0.2 * x.argmin(-1).unsqueeze(-1)
            )
            return self.head(x.flatten(2) + least.unsqueeze(-1))

    torch.manual_seed(1)
    model = Extremes().eval()
    agree(model, model)


def test_the_text_part_of_a_model_with_several_parts(tmp_path: Path) -> None:
    """Stored with its other parts, under the names of the whole; only text is computed."""
    text = tiny.CONFIGS["gemma2"] | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    text = {k: v for k, v in text.items() if k != "tie_word_embeddings"}
    vision = dict(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28
    )
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration._from_config(
        config, attn_implementation="eager"
    ).eval()
    tiny.randomize(model)
    model.save_pretrained(tmp_path)
    imported = agree(tmp_path, model)
    assert any("vision" in name for name in imported.info.unused)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tiny.save("llama", tmp_path)


def reloaded(directory: Path) -> Any:
    """transformers' own reading of the checkpoint, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_checkpoint(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny.build("qwen2").to(dtype).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    imported = agree(tmp_path, reloaded(tmp_path))
    stored = imported.weights.read("model.norm.weight").dtype
    assert stored == (ml_dtypes.bfloat16 if dtype is torch.bfloat16 else np.float16)


def test_shards_of_any_name_with_tensors_that_are_not_read(checkpoint: Path) -> None:
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {
        "weights part 1.safetensors": {n: tensors[n] for n in names[::2]},
        "b-of-many.safetensors": {n: tensors[n] for n in names[1::2]} | {"left.over": torch.ones(3)},
    }
    for file, content in parts.items():
        save_file(content, checkpoint / file)
    index = {"weight_map": {n: file for file, content in parts.items() for n in content}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    imported = agree(checkpoint, tiny.build("llama"))
    assert imported.info.unused == ("left.over",)


def test_a_vocabulary_padded_beyond_the_tokenizer(tmp_path: Path) -> None:
    model = tiny.build("gemma")
    model.resize_token_embeddings(192)
    model.save_pretrained(tmp_path)
    assert agree(tmp_path, reloaded(tmp_path)).info.vocab_size == 192


@pytest.mark.parametrize("stored", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_tied_head_is_stored_once_under_either_name(stored: str, checkpoint: Path) -> None:
    path = checkpoint / "model.safetensors"
    tensors = load_file(path)
    tensors[stored] = tensors.pop("model.embed_tokens.weight")
    reference = tiny.build("llama")
    save_file(tensors, path)
    agree(checkpoint, reference)


@pytest.mark.parametrize(
    "name",
    [
        "falcon",
        "gpt_neo",
        "mpt",
        "bloom",
        "gptj",
        "cohere2",
        "gemma3_text",
        "nemotron",
        "smollm3",
        "deepseek_v3",
    ],
)
def test_more_architectures(name: str, tmp_path: Path) -> None:
    """Constants made inside forward, negative slices, ALiBi, interleaved rotations, latent attention."""
    torch.manual_seed(0)
    shapes = {k: v for k, v in tiny.CONFIGS["llama"].items() if k not in OTHER_NAMES.get(name, {})}
    config = transformers.AutoConfig.for_model(name, **shapes | OTHER_NAMES.get(name, {}))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    tiny.randomize(model)
    model.save_pretrained(tmp_path)
    agree(tmp_path, model)


OTHER_NAMES: dict[str, dict[str, Any]] = {
    "falcon": dict(multi_query=True, new_decoder_architecture=False, parallel_attn=True),
    "gpt_neo": dict(num_layers=2, attention_types=[[["global", "local"], 1]], num_heads=3, window_size=9),
    "mpt": dict(d_model=96, n_heads=4, n_layers=2, max_seq_len=tiny.CONTEXT),
    "bloom": dict(n_layer=2, n_head=3),
    "gptj": dict(n_embd=96, n_layer=2, n_head=3, n_positions=tiny.CONTEXT, rotary_dim=8),
    "cohere2": dict(sliding_window=9, layer_types=["sliding_attention", "full_attention"]),
    "gemma3_text": dict(
        head_dim=32, sliding_window=9, layer_types=["sliding_attention", "full_attention"]
    ),
    "deepseek_v3": dict(
        first_k_dense_replace=2, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=24, num_key_value_heads=3,
    ),
}  # fmt: skip
