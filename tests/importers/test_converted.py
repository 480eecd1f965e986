"""Arrays that a checkpoint stores in another layout than the model's are those that transformers computes.

Published mixtures of experts have a matrix for each expert, and some models fused projections; transformers'
save_pretrained writes these layouts, or the model's own with save_original_format=False.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ConversionOps,
    Interleave,
    PermuteForRope,
    Transpose,
    WeightConverter,
)

from compiler.checkpoint import open_checkpoint
from compiler.errors import CompileError
from compiler.importers import ImportRefused, load
from compiler.importers.arrangement import whole
from compiler.importers.choose import choose_model
from compiler.importers.configuration import read_config
from compiler.importers.conversions import arrange
from compiler.importers.converted import ConvertedSource
from compiler.importers.huggingface import open_weights
from compiler.importers.stored_names import Conversion, Source
from compiler.weights import ArraySource, LayeredSource, WeightError, read_as
from ir.text import print_graph
from ir.types import DType
from tests.importers.compare import TOLERANCE, worst
from tests.model import tiny

E, K = 5, 2  # experts, and how many a token has
_EXPERTS = dict(
    num_experts=E, num_local_experts=E, n_routed_experts=E, moe_num_experts=E, num_experts_per_tok=K,
    moe_intermediate_size=24, shared_expert_intermediate_size=40, moe_layer_start_index=0, moe_k=K,
    first_k_dense_replace=0, n_group=1, topk_group=1, moe_topk=K, num_shared_experts=1, n_shared_experts=1,
)  # fmt: skip
_LATENT = dict(q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=24)
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {}, "qwen2_moe": {}, "qwen3_moe": dict(head_dim=32), "olmoe": {}, "dots1": {},
    "glm4_moe": {}, "ernie4_5_moe": {}, "hunyuan_v1_moe": dict(head_dim=32),
    "deepseek_v3": dict(num_key_value_heads=3, **_LATENT), "sarvam_moe": dict(head_dim=32),
    "hrm_text": dict(num_key_value_heads=3, num_layers_per_stack=1),
}  # fmt: skip


def build(name: str) -> Any:
    known = transformers.AutoConfig.for_model(name)
    shape = tiny._DECODER | _EXPERTS | MODELS[name]
    config = transformers.AutoConfig.for_model(name, **{k: v for k, v in shape.items() if hasattr(known, k)})
    config.use_cache = False
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    tiny.randomize(model)
    with torch.no_grad():
        for parameter in model.parameters():  # every array is its own; some start as zeros
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def sources(directory: Path) -> tuple[ConvertedSource, LayeredSource]:
    stored, _ = open_checkpoint(directory)
    model, names = choose_model(read_config(directory), stored.names)
    converted = ConvertedSource(stored, names, model, str(directory))
    renames = {own: name for own, name in names.plain.items() if own != name}
    return converted, LayeredSource((converted, stored), renames)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODELS)
def test_arrays_are_those_that_transformers_loads(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    build(name).to(dtype).save_pretrained(tmp_path, max_shard_size="60KB")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    converted, arrays = sources(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2 and len(converted.names) >= 4
    for own, array in expected.items():
        found = arrays.read(own)
        assert found.astype(np.float32).tobytes() == array.contiguous().numpy().tobytes(), own
        bounds = [(0, 1), (1, 3), (len(found) - 1, len(found)), (2, 2)]
        assert all(arrays.rows(own, lo, hi).tobytes() == found[lo:hi].tobytes() for lo, hi in bounds), own
        assert arrays.type(own).dtype.numpy == found.dtype
    stored, _ = open_checkpoint(tmp_path)
    for own in converted.names:
        assert arrays.type(own).dtype is DTYPES[dtype]
        rows = [stored.rows(part.name, part.lo, part.hi) for part in converted.row_parts(own) or ()]
        assert np.concatenate(rows).tobytes() == arrays.read(own).tobytes(), own


DTYPES = {torch.float32: DType.F32, torch.bfloat16: DType.BF16, torch.float16: DType.F16}


@pytest.mark.parametrize("name", ["mixtral", "hrm_text"])
def test_both_layouts_give_the_same_graph_and_arrays(name: str, tmp_path: Path) -> None:
    model = build(name)
    model.save_pretrained(tmp_path / "m")
    published = load(tmp_path / "m", max_context=tiny.CONTEXT)
    model.save_pretrained(tmp_path / "own" / "m", save_original_format=False)
    own = load(tmp_path / "own" / "m", max_context=tiny.CONTEXT)
    assert print_graph(published.graph) == print_graph(own.graph)
    assert published.info.unused == own.info.unused == ()
    for weight in own.graph.weights:
        assert published.weights.type(weight.name) == own.weights.type(weight.name)
        found, expected = read_as(published.weights, weight), read_as(own.weights, weight)
        assert found.tobytes() == expected.tobytes(), weight.name
    assert worst(published, model, 17, tiny.VOCAB) <= TOLERANCE


EXPERT = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"
OWN = "model.layers.1.mlp.experts.{}"


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mixtral")
    build("mixtral").save_pretrained(directory)
    return directory


def changed(directory: Path, out: Path, change: Any) -> tuple[ConvertedSource, Any]:
    """A copy of a checkpoint whose arrays are changed in place, and the names that it gives the model."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    (out / "config.json").write_text((directory / "config.json").read_text())
    save_file(tensors, out / "model.safetensors")
    stored, _ = open_checkpoint(out)
    model, names = choose_model(read_config(out), stored.names)
    return ConvertedSource(stored, names, model, str(out)), names


def put(name: str, array: Any) -> Any:
    return lambda tensors: tensors.update({name: array})


def remove(*names: str) -> Any:
    return lambda tensors: [tensors.pop(name) for name in names]


INNER, HIDDEN = 112, 96
FAULTS = {
    "the first is missing": (remove(EXPERT.format(0, "w1")), "gate_up_proj", "experts.0.w1.weight': it is m"),
    "one is missing": (remove(EXPERT.format(3, "w2")), "down_proj", "experts.3.w2.weight': it is missing"),
    "the last is missing": (remove(EXPERT.format(4, "w3")), "gate_up_proj", "experts.4.w3.weight': it is m"),
    "all of a kind are missing": (
        remove(*(EXPERT.format(i, "w3") for i in range(E))), "gate_up_proj",
        "experts.0.w1.weight': nothing is stored beside it as '.experts.*.w3.weight'",
    ),
    "one too many": (
        put(EXPERT.format(5, "w2"), torch.zeros(HIDDEN, INNER)), "down_proj",
        "experts.5.w2.weight': it is one too many: the configuration makes .* of 5 parts",
    ),
    "a huge number": (
        put(EXPERT.format(10**40, "w2"), torch.zeros(HIDDEN, INNER)), "down_proj", "stands where its number",
    ),
    "no number": (
        put(EXPERT.format("all", "w2"), torch.zeros(HIDDEN, INNER)), "down_proj",
        "experts.all.w2.weight': 'all' stands where its number is expected",
    ),
    "a number written otherwise": (
        put(EXPERT.format("01", "w2"), torch.zeros(HIDDEN, INNER)), "down_proj", "'01' stands where",
    ),
    "another size": (
        put(EXPERT.format(3, "w2"), torch.zeros(HIDDEN, INNER - 1)), "down_proj",
        r"experts.3.w2.weight': it has the shape \[96, 111\], and what belongs beside it \[96, 112\]",
    ),
    "another number of axes": (
        put(EXPERT.format(0, "w2"), torch.zeros(HIDDEN)), "down_proj", r"experts.1.w2.weight': it has",
    ),
    "another element type": (
        put(EXPERT.format(3, "w2"), torch.zeros(HIDDEN, INNER, dtype=torch.int32)), "down_proj",
        "experts.3.w2.weight': it is stored as i32, and what belongs beside it as f32",
    ),
    "gates and ups of other sizes": (
        lambda t: t.update({EXPERT.format(i, "w3"): torch.zeros(INNER, HIDDEN - 1) for i in range(E)}),
        "gate_up_proj", "experts.0.w3.weight': it has the shape",
    ),
    "all of another size": (
        lambda t: t.update({EXPERT.format(i, "w2"): torch.zeros(HIDDEN, 7) for i in range(E)}), "down_proj",
        r"experts.0.w2.weight': it and what belongs to it make .* \[5, 96, 7\], but the config",
    ),
    "transposed": (
        lambda t: t.update({EXPERT.format(i, "w2"): torch.zeros(INNER, HIDDEN) for i in range(E)}),
        "down_proj", r"make .* \[5, 112, 96\], but the configuration makes it \[5, 96, 112\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_put_together_is_refused_by_name(fault: str, mixtral: Path, tmp_path: Path) -> None:
    change, own, message = FAULTS[fault]
    converted, _ = changed(mixtral, tmp_path, change)
    for use in (converted.type, converted.read, lambda name: converted.rows(name, 0, 1)):
        with pytest.raises(CompileError, match=message):
            use(OWN.format(own))
    assert converted.read("model.layers.0.mlp.experts.down_proj").shape == (E, HIDDEN, INNER)


@pytest.mark.parametrize(
    ("own", "array", "stored"),
    [
        (OWN.format("down_proj"), torch.zeros(E, HIDDEN, INNER), EXPERT.format(0, "w2")),
        (OWN.format("gate_up_proj"), torch.zeros(E, 2 * INNER, HIDDEN), EXPERT.format(0, "w1")),
    ],
)
def test_both_layouts_in_one_checkpoint_are_refused(
    own: str, array: Any, stored: str, mixtral: Path, tmp_path: Path
) -> None:
    _, names = changed(mixtral, tmp_path, put(own, array))
    with pytest.raises(WeightError, match=f"{stored}': '{own}' is stored twice, as this and from '{own}'"):
        names.check_single([own], "m")
    names.check_single(["model.layers.0.mlp.experts.down_proj"], "m")


def test_an_array_under_two_names_is_refused(mixtral: Path, tmp_path: Path) -> None:
    router = "model.layers.1.mlp.gate.weight"
    _, names = changed(mixtral, tmp_path, put(router, torch.zeros(E, HIDDEN)))
    with pytest.raises(WeightError, match="'model.layers.1.mlp.gate.weight' is stored twice"):
        names.check_single([router], "m")


def test_element_types_that_differ_are_read_in_the_one_that_holds_all(mixtral: Path, tmp_path: Path) -> None:
    name, half = EXPERT.format(3, "w2"), torch.randn(HIDDEN, INNER).bfloat16()
    converted, _ = changed(mixtral, tmp_path, put(name, half))
    own = OWN.format("down_proj")
    assert converted.type(own).dtype is DType.F32
    assert np.array_equal(converted.rows(own, 3, 4)[0], half.float().numpy())
    assert (
        converted.read(own)[2].tobytes()
        == load_file(mixtral / "model.safetensors")[EXPERT.format(2, "w2")].numpy().tobytes()
    )


def test_more_experts_than_ten_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    config = build("mixtral").config
    config.num_local_experts = 12
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)
    own = OWN.format("down_proj")
    assert sources(tmp_path)[1].read(own).tobytes() == model.state_dict()[own].numpy().tobytes()


class Unknown(ConversionOps):
    def convert(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError


def test_an_operation_that_is_not_known_is_refused_by_name(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import conversion_mapping

    table: Any = conversion_mapping.get_checkpoint_conversion_mapping("mixtral")
    table[-1].operations.append(Unknown())
    real = conversion_mapping.get_checkpoint_conversion_mapping
    monkeypatch.setattr(
        conversion_mapping,
        "get_checkpoint_conversion_mapping",
        lambda name: table if name == "mixtral" else real(name),
    )
    converted, _ = changed(mixtral, tmp_path, lambda tensors: None)
    with pytest.raises(ImportRefused, match=r"experts.0.w2.weight'.* from it by Unknown, an operation"):
        converted.type(OWN.format("down_proj"))
    assert converted.type(OWN.format("gate_up_proj")).shape == (E, 2 * INNER, HIDDEN)


class Watched(ArraySource):
    """Notes what is read of it."""

    def __init__(self, arrays: Any) -> None:
        super().__init__(arrays)
        self.found: list[tuple[str, int, int]] = []

    def rows(self, name: str, lo: int, hi: int) -> Any:
        self.found.append((name, lo, hi))
        return super().rows(name, lo, hi)


def test_one_expert_is_read_from_its_own_arrays_alone(mixtral: Path) -> None:
    tensors = load_file(mixtral / "model.safetensors")
    stored = Watched({name: tensor.numpy() for name, tensor in tensors.items()})
    model, names = choose_model(read_config(mixtral), stored.names)
    converted = ConvertedSource(stored, names, model, "m")
    up, down = OWN.format("gate_up_proj"), OWN.format("down_proj")
    expert = converted.rows(up, 3, 4)
    assert expert.nbytes == 2 * INNER * HIDDEN * 4
    assert stored.found == [(EXPERT.format(3, w), 0, INNER) for w in ("w1", "w3")]
    assert converted.rows(up, 3, 4) is expert and len(stored.found) == 2  # for who packs it in several steps
    assert np.shares_memory(converted.rows(down, 2, 3), tensors[EXPERT.format(2, "w2")].numpy())
    assert stored.found[2:] == [(EXPERT.format(2, "w2"), 0, HIDDEN)]


def test_quantised_experts_that_are_stored_one_by_one(mixtral: Path, tmp_path: Path) -> None:
    """As floats: what each one's codes stand for, beside one that was left as it is."""
    weights = dict(num_bits=8, type="int", strategy="channel", symmetric=True)
    scheme = dict(
        quant_method="compressed-tensors", format="int-quantized", config_groups=dict(g=dict(weights=weights))
    )
    tensors, expected, rng = (
        load_file(mixtral / "model.safetensors"),
        dict[str, Any](),
        np.random.default_rng(0),
    )
    for name in [n for n in tensors if ".experts." in n and n != EXPERT.format(2, "w3")]:
        codes = rng.integers(-127, 128, tuple(tensors[name].shape)).astype(np.int8)
        scale = rng.random((len(codes), 1), np.float32)
        tensors[name], expected[name] = torch.tensor(codes), codes * scale
        tensors[name.replace("weight", "weight_scale")] = torch.tensor(scale)
    name = EXPERT.format(2, "w3")
    tensors[name], expected[name] = tensors[name].bfloat16(), tensors[name].bfloat16().float().numpy()
    config = json.loads((mixtral / "config.json").read_text()) | {"quantization_config": scheme}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    stored, _ = open_weights(tmp_path)
    model, names = choose_model(read_config(tmp_path), stored.names)
    converted = ConvertedSource(stored, names, model, str(tmp_path))
    for i in range(E):
        up = np.concatenate([expected[EXPERT.format(i, w)] for w in ("w1", "w3")])
        assert np.array_equal(converted.rows(OWN.format("gate_up_proj"), i, i + 1)[0], up)
        assert np.array_equal(converted.read(OWN.format("down_proj"))[i], expected[EXPERT.format(i, "w2")])
    names.check_single(converted.names, "m")
    assert set(names.used(model.state_dict())) == set(stored.names)


PATTERNS = {
    "cut": (["a"], ["x", "y", "z"], [Chunk(dim=0)], {"a": (12, 7)}),
    "cut unevenly": (["a"], ["x", "y"], [Chunk(dim=1)], {"a": (3, 7)}),
    "joined": (["a", "b"], ["x"], [Concatenate(dim=1)], {"a": (3, 2), "b": (3, 5)}),
    "transposed": (["a"], ["x"], [Transpose(1, 2)], {"a": (3, 2, 5)}),
    "transposed and cut": (["a"], ["x", "y"], [Transpose(0, 1), Chunk(dim=0)], {"a": (3, 8)}),
    "even and odd": (["a"], ["x"], [Interleave(dim=1)], {"a": (3, 10)}),
    "even and odd, back": (["a"], ["x"], [Interleave(dim=0, inverse=True)], {"a": (10, 3)}),
    "even and odd, cut": (["a"], ["x", "y"], [Interleave(dim=0), Chunk(dim=0)], {"a": (12, 3)}),
    "rotated": (["a"], ["x"], [PermuteForRope()], {"a": (18, 5)}),
    "rotated back": (["a"], ["x"], [PermuteForRope(inverse=True)], {"a": (24, 5)}),
    "rotated bias": (["a"], ["x"], [PermuteForRope()], {"a": (18,)}),
    "cut, some rotated": (
        ["a"], ["x", "y"], [Chunk(dim=0), PermuteForRope(permute_layer_names=["y"])], {"a": (36, 5)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
def test_operations_compute_what_those_of_transformers_do(pattern: str) -> None:
    sources, targets, operations, shapes = PATTERNS[pattern]
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    config = SimpleNamespace(num_attention_heads=3)
    expected: Any = {name: [torch.tensor(array)] for name, array in arrays.items()}
    for operation in operations:
        expected = operation.convert(
            expected, source_patterns=sources, target_patterns=targets, config=config, full_layer_name="x"
        )
    converter = WeightConverter(sources, targets, operations)
    conversion = Conversion(converter, targets[0], [Source(name, name, "") for name in sources])
    found = arrange(conversion, ArraySource(arrays), {}, config, "m")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        tensor = tensor[0] if isinstance(tensor, list) else tensor
        array = found[name]
        assert array.shape == tuple(tensor.shape)
        assert np.array_equal(array.read(whole(array)), tensor.numpy())
        for bounds in itertools.product(*([(0, n), (1, n), (1, 2)] for n in array.shape)):
            assert np.array_equal(array.read(bounds), tensor.numpy()[tuple(slice(*b) for b in bounds)])
