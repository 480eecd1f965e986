"""Mixtures of experts, compiled, beside transformers: in float32, in bfloat16, and with weights in 8 bits.

And the bits of a request alone and beside others, whose tokens choose other experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from ir.graph import Value
from tests.model import tiny
from tests.model.forced import kl, tokens
from tests.model.harness import Stepper

_SMALL = dict(
    vocab_size=tiny.VOCAB, hidden_size=96, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
    head_dim=32, max_position_embeddings=tiny.CONTEXT, initializer_range=0.1, tie_word_embeddings=False,
)  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": _SMALL | dict(intermediate_size=112, num_local_experts=5, num_experts_per_tok=2),
    "qwen3_moe": _SMALL
    | dict(intermediate_size=96, moe_intermediate_size=40, num_experts=16, num_experts_per_tok=4)
    | dict(norm_topk_prob=True),
}
LENGTHS = (1, 16, 70)


class Family:
    """One model and what is compiled from it."""

    def __init__(self, name: str, folder: Path) -> None:
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(name, **CONFIGS[name])
        self.model: Any = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        tiny.randomize(self.model)
        self.model.eval().float()
        self.folder = folder
        self.model.save_pretrained(folder / "checkpoint")

    def compiled(self, name: str, **options: Any) -> Stepper:
        engine = self.folder / f"{name}.octavo"
        if not engine.exists():
            tiny.compiled(self.folder / "checkpoint", engine, **options)
        return Stepper(engine, tiny.CONTEXT)


@pytest.fixture(scope="module", params=list(CONFIGS))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def kinds(stepper: Stepper) -> list[str]:
    """Of the linears of experts in the graph that runs."""
    return [op.kind for op in stepper.graph.ops if "moe_linear" in op.kind]


def test_float32_logits_are_those_of_transformers(family: Family) -> None:
    stepper = family.compiled("f32")
    assert kinds(stepper) == ["moe_linear"] * 4
    for length in LENGTHS:
        expected = tiny.reference_logits(family.model, tokens(length)).numpy()
        assert np.abs(stepper.logits(tokens(length)) - expected).max() < 1e-5 * expected.std()


def test_a_request_has_the_same_bits_alone_token_by_token_and_beside_others(family: Family) -> None:
    stepper = family.compiled("f32")
    prompts = [tokens(length) for length in (23, 16, 70)]
    whole = [stepper.logits(ids) for ids in prompts]
    assert np.array_equal(stepper.run([[i] for i in prompts[0]]), whole[0])
    steps = [
        [(0, 0, 9), (1, 0, 16), (2, 0, 33)],
        [(0, 9, 10), (2, 33, 34)],
        [(2, 34, 70), (0, 10, 23)],
    ]
    for alone, together in zip(whole, stepper.batch(prompts, steps), strict=True):
        assert np.array_equal(alone, together)


def test_bfloat16_is_as_close_to_float32_as_transformers_is(family: Family) -> None:
    """Where two experts are all but equal, a rounding chooses the other, here as there: in the mean."""
    stepper = family.compiled("bf16", dtype="bf16")
    assert kinds(stepper) == ["moe_linear"] * 4
    assert {op.args[1].type.dtype for op in stepper.graph.ops if op.kind == "moe_linear"} == {"bf16"}  # type: ignore[union-attr]
    narrow = copy.deepcopy(family.model).bfloat16()
    ours, theirs = 0.0, 0.0
    for seed in range(100, 112):
        exact = tiny.reference_logits(family.model, tokens(seed)).numpy()
        theirs += kl(exact, tiny.reference_logits(narrow, tokens(seed)).numpy())
        ours += kl(exact, stepper.logits(tokens(seed)))
    assert ours < 1.5 * theirs


def by_linear(model: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A copy whose layers' matrices are changed, those of experts too, but not what chooses among them."""
    found = copy.deepcopy(model)
    with torch.no_grad():
        for name, array in found.named_parameters():
            if name.startswith("model.layers") and array.ndim > 1 and ".gate." not in name:
                array.copy_(change(array))
    return found


def round_to_8_bits(w: torch.Tensor) -> torch.Tensor:
    """Each 32 elements along the last axis to multiples of a scale of f16, 127 of which are the largest."""
    groups = torch.nn.functional.pad(w, (0, -w.shape[-1] % 32)).unflatten(-1, (-1, 32)).double()
    scale = (groups.abs().amax(-1, keepdim=True) / 127).half().double()
    codes = (groups / scale.where(scale > 0, 1)).round().clamp(-127, 127)
    return (codes * scale).flatten(-2)[..., : w.shape[-1]].float()


def test_weights_in_8_bits_give_the_logits_of_a_model_with_rounded_weights(family: Family) -> None:
    options = dict(
        quantize="int8", algorithm="rtn", activations="none", keep=("lm_head", "model.embed_tokens")
    )
    stepper = family.compiled("int8", **options)
    assert kinds(stepper) == ["qmoe_linear"] * 4
    rounded = by_linear(family.model, round_to_8_bits)
    for length in LENGTHS:
        expected = tiny.reference_logits(rounded, tokens(length)).numpy()
        assert np.abs(stepper.logits(tokens(length)) - expected).max() < 1e-4 * expected.std()
        exact = tiny.reference_logits(family.model, tokens(length)).numpy()
        assert np.abs(exact - expected).max() > 1e-3 * expected.std()  # that rounding shows


def test_codes_of_what_is_read_change_no_bits_by_company(family: Family) -> None:
    stepper = family.compiled("int4", quantize="int4", algorithm="rtn", max_kl=100.0)
    graph = stepper.graph
    assert {op.attr("x_dtype") for op in graph.ops if op.kind == "qmoe_linear"} == {"i8"}
    assert all(isinstance(op.args[3], Value) for op in graph.ops if op.kind == "qmoe_linear")
    prompts = [tokens(length) for length in (19, 40)]
    whole = [stepper.logits(ids) for ids in prompts]
    steps = [[(0, 0, 5), (1, 0, 1)], [(1, 1, 40), (0, 5, 19)]]
    for alone, together in zip(whole, stepper.batch(prompts, steps), strict=True):
        assert np.isfinite(alone).all() and np.array_equal(alone, together)
