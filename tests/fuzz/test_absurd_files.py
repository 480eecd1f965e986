"""Numbers of a config.json, and a tokenizer.json, that other people's libraries do not survive."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import compiler
from compiler.errors import CompileError
from compiler.importers.bounded import MAX_OPS, Bounded
from compiler.importers.config_limits import check_numbers
from compiler.importers.configuration import config_context
from compiler.importers.huggingface import load_directory
from compiler.importers.refused import ImportRefused
from compiler.survey import survey
from runtime.errors import ArtifactError
from runtime.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000: at most 1,024"),
        ({"n_layer": -(10**9)}, "'n_layer'"),
        ({"text_config": {"num_experts": 10**6}}, "'num_experts'"),
        ({"head_dim": 2**31}, "'head_dim'"),
        ({"hidden_sizes": [64, 2**40]}, "'hidden_sizes'"),
        ({"vocab_size": 2**40}, "'vocab_size'"),
        ({"num_labels": 10**9}, "'num_labels'"),  # transformers makes a name for each
    ],
)
def test_absurd_numbers_are_refused_before_a_model_is_built(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportRefused, match=message) as caught:
        check_numbers(config, "config.json")
    assert caught.value.todo


def test_those_of_real_models_are_not() -> None:
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 262144, "head_dim": 256}
    counts = {"num_hidden_layers": 126, "num_local_experts": 256, "max_position_embeddings": 10485760}
    counts |= {"shared_expert_intermediate_size": 20480, "vocab_size_per_layer_input": 262144}
    check_numbers(sizes | counts | {"rope_theta": 5e5}, "config.json")


def test_true_is_no_number_of_positions() -> None:
    with pytest.raises(ImportRefused, match="no maximum number of positions"):
        config_context(SimpleNamespace(seq_length=True))


def test_a_part_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "d_model": 8, "text_config": []}))
    with pytest.raises(ImportRefused, match="its text_config is not a configuration"):
        load_directory(tmp_path, 64, weights=False)


def test_a_model_is_not_built_beyond_its_bounds() -> None:
    """Both passed by each number, and took memory or time without end."""
    with (
        pytest.raises(ImportRefused, match="arrays of 10,000,000,000 bytes") as caught,
        Bounded("config.json"),
    ):
        torch.ones((100_000, 100_000), dtype=torch.bool)
    assert caught.value.where == "config.json" and caught.value.todo
    with pytest.raises(ImportRefused, match="arrays of"), Bounded("config.json"):
        _ = torch.arange(2**20)[:, None] * torch.arange(2**20)
    with pytest.raises(ImportRefused, match="too many parts"), Bounded("config.json"):
        for _ in range(MAX_OPS + 1):
            torch.empty(1)


def test_parameters_take_no_memory_before_they_are_moved() -> None:
    with Bounded("config.json"):
        assert torch.empty(2**50).device.type == "meta"
        assert torch.empty(2**10).device.type == "cpu"


def test_explain_reads_no_configuration_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text('{"model_type": "secret", "num_hidden_layers": 3}')
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(CompileError, match="symbolic link"):
        compiler.explain(folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")  # a read would never end
    assert survey(folder, weights=False).max_context is None
    with pytest.raises(CompileError, match="missing"):
        compiler.explain(folder)


def test_explain_escapes_what_a_configuration_holds(tmp_path: Path) -> None:
    config = {"model_type": "\x1b[31mred\nblue", "layer_types": [[]], "auto_map": {"a": "b"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = str(compiler.explain(tmp_path))
    assert "\\x1b[31mred blue" in text and all(c.isprintable() or c == "\n" for c in text)


def test_a_tokenizer_on_which_the_library_panics_is_refused() -> None:
    """A panic is no Exception: it ended whoever read the file."""
    model = {
        "type": "BPE",
        "continuing_subword_prefix": "A" * 8,
        "vocab": {"a": 0, "b": 1, "ab": 2},
        "merges": [["a", "b"]],
    }
    with pytest.raises(ArtifactError, match="tokenizer.json: cannot be read"):
        Tokenizer(json.dumps({"version": "1.0", "added_tokens": [], "model": model}))
