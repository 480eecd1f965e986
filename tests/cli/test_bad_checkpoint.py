"""Checkpoints that cannot be compiled: each refused in one line with the file, or the op and its place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save, save_file

from compiler.importers.aten import CONVERTERS
from tests.cli.refused import Commands, little_memory

CONFIG = {
    "model_type": "llama", "vocab_size": 17, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
LAYER = {
    "input_layernorm": (16,), "post_attention_layernorm": (16,), "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16), "self_attn.v_proj": (8, 16), "self_attn.o_proj": (16, 16),
    "mlp.gate_proj": (16, 16), "mlp.up_proj": (16, 16), "mlp.down_proj": (16, 16),
}  # fmt: skip
SHAPES = {f"model.layers.0.{name}.weight": shape for name, shape in LAYER.items()} | {
    "model.embed_tokens.weight": (17, 16),
    "model.norm.weight": (16,),
}
WEIGHTS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
INDEX = "model.safetensors.index.json"


def entry(shape: list[int], first: int, last: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [first, last]}


def with_header(header: object, data: bytes = bytes(64)) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def checkpoint(folder: Path, weights: bytes | None = None, config: Any = CONFIG) -> Path:
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_bytes(
            config if isinstance(config, bytes) else json.dumps(config).encode()
        )
    if weights is not None:
        (folder / "model.safetensors").write_bytes(weights)
    return folder


GOOD = save(WEIGHTS)
WRONG_WEIGHTS = {
    "missing": (None, "there are no weights"),
    "empty": (b"", "truncated"),
    "cut in the length": (GOOD[:5], "truncated"),
    "cut in the header": (GOOD[:100], "truncated"),
    "cut in the data": (GOOD[:-1], "truncated"),
    "a header of 2**60 bytes": (
        (2**60).to_bytes(8, "little") + b"{}",
        "the header claims 1152921504606846976",
    ),
    "a tensor of 2**60 bytes": (with_header({"a": entry([2**58], 0, 2**60)}), "truncated"),
    "a shape of 2**60": (with_header({"a": entry([2**60], 0, 64)}), "shape"),
    "overlapping tensors": (with_header({"a": entry([4], 0, 16), "b": entry([4], 8, 24)}), "overlap"),
    "garbage": (bytes(range(256)) * 9, "the header claims"),
    "a list": (with_header([1]), "not a JSON object"),
}
WRONG_CONFIGS = {
    "missing": (None, "it is missing"),
    "empty": (b"", "not valid JSON"),
    "a list": ([], "not a JSON object"),
    "garbage": (bytes(range(256)), "not valid JSON"),
    "its own code": (CONFIG | {"auto_map": {"AutoModel": "mine.Mine"}}, "its own model code"),
    "quantised": (CONFIG | {"quantization_config": {"quant_method": "gptq"}}, "quantised (gptq)"),
}


@pytest.mark.parametrize(("weights", "says"), WRONG_WEIGHTS.values(), ids=list(WRONG_WEIGHTS))
def test_wrong_weights(commands: Commands, tmp_path: Path, weights: bytes | None, says: str) -> None:
    folder = checkpoint(tmp_path / "model", weights)
    with little_memory():
        commands.refuses("compile", folder, "-o", tmp_path / "m.octavo", says=says, where=str(folder))


@pytest.mark.parametrize(("config", "says"), WRONG_CONFIGS.values(), ids=list(WRONG_CONFIGS))
def test_a_wrong_configuration(commands: Commands, tmp_path: Path, config: Any, says: str) -> None:
    folder = checkpoint(tmp_path / "model", GOOD, config)
    where = f"{folder}/config.json"
    commands.refuses("compile", folder, "-o", tmp_path / "m.octavo", says=says, where=where)


def outside(folder: Path) -> Path:
    """A file of weights that is not the checkpoint's."""
    (folder.parent / "outside").mkdir()
    save_file({"a": np.zeros(3, np.float32)}, folder.parent / "outside/a.safetensors")
    return folder.parent / "outside"


def index(folder: Path, shard: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))


WAYS_OUT: dict[str, Callable[[Path, Path], object]] = {
    "up": lambda folder, _: index(folder, "../outside/a.safetensors"),
    "absolute": lambda folder, other: index(folder, str(other / "a.safetensors")),
    "a linked shard": lambda folder, other: (
        (folder / "a.safetensors").symlink_to(other / "a.safetensors"),
        index(folder, "a.safetensors"),
    ),
    "a linked folder": lambda folder, other: (
        (folder / "sub").symlink_to(other),
        index(folder, "sub/a.safetensors"),
    ),
    "a linked file": lambda folder, other: (folder / "model.safetensors").symlink_to(other / "a.safetensors"),
    "a linked index": lambda folder, other: (
        index(other, "a.safetensors"),
        (folder / INDEX).symlink_to(other / INDEX),
    ),
    "a newline": lambda folder, _: index(folder, "a\n.safetensors"),
    "a NUL": lambda folder, _: index(folder, "a\0.safetensors"),
    "a missing shard": lambda folder, _: index(folder, "a.safetensors"),
    "no name": lambda folder, _: index(folder, ""),
}


@pytest.mark.parametrize("leave", WAYS_OUT.values(), ids=list(WAYS_OUT))
def test_weights_elsewhere(commands: Commands, tmp_path: Path, leave: Callable[[Path, Path], object]) -> None:
    folder = checkpoint(tmp_path / "model")
    leave(folder, outside(folder))
    commands.refuses("compile", folder, "-o", tmp_path / "m.octavo", where=str(folder))


def test_weights_of_another_shape(commands: Commands, tmp_path: Path) -> None:
    weights = save(WEIGHTS | {"model.norm.weight": np.zeros(5, np.float32)})
    folder = checkpoint(tmp_path / "model", weights)
    where = f"{folder}, tensor 'model.norm.weight'"
    commands.refuses("compile", folder, "-o", tmp_path / "m.octavo", says="has shape [5]", where=where)


def test_an_unsupported_op(commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(CONVERTERS, "aten.silu.default")
    folder = checkpoint(tmp_path / "model", GOOD)
    where = "aten.silu.default in model.layers.0.mlp.act_fn"
    commands.refuses("compile", folder, "-o", tmp_path / "m.octavo", says="no converter", where=where)


def test_a_lowering_that_cannot_be_proved(commands: Commands, tmp_path: Path) -> None:
    text = (
        "graph @g(%ids: i32[1,S], %pos: i32[1,S]) dims {S: 1..8} {\n"
        "  %x = embed %ids, @e: f32[5,6] : f32[1,S,6] // model.embed\n"
        "  %y = cumsum %x {axis=1} : f32[1,S,6] // model.layers.3.mixer\n"
        "  return %y\n}\n"
    )
    (tmp_path / "g.ir").write_text(text)
    where = f"{tmp_path / 'g.ir'}, model.layers.3.mixer"
    commands.refuses("opt", tmp_path / "g.ir", "-p", "page_kv", where=where)


NO_GRAPH = {
    "": "line 1", "\0": "line 1", "import os": "line 1", "graph @g(": "line 1", "{" * 9999: "line 1",
    "graph @g(%x: f32[3]) {\n  %y = frobnicate %x : f32[3]\n  return %y\n}\n": "%y",
    "graph @g(%x: f32[3]) {\n  %y = neg %x : f32[4]\n  return %y\n}\n": "%y",
    "graph @g(%x: f32[3]) {\n  return %z\n}\n": "line 2",
}  # fmt: skip


@pytest.mark.parametrize(("text", "where"), NO_GRAPH.items(), ids=[str(i) for i in range(len(NO_GRAPH))])
def test_what_is_no_graph(commands: Commands, text: str, where: str) -> None:
    commands.refuses("opt", "-", "-p", "dce", stdin=text, where=where)
