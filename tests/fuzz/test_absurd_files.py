"""Numbers of a config.json, and a tokenizer.json, that other people's libraries do not survive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from compiler.importers.config_limits import check_numbers
from compiler.importers.refused import ImportRefused
from runtime.errors import ArtifactError
from runtime.tokenizer import Tokenizer


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000: at most 4,096"),
        ({"n_layer": -(10**9)}, "'n_layer'"),
        ({"text_config": {"num_experts": 10**6}}, "'num_experts'"),
        ({"head_dim": 2**31}, "'head_dim'"),
        ({"hidden_sizes": [64, 2**40]}, "'hidden_sizes'"),
        ({"vocab_size": 2**40}, "'vocab_size'"),
    ],
)
def test_absurd_numbers_are_refused_before_a_model_is_built(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ImportRefused, match=message) as caught:
        check_numbers(config, "config.json")
    assert caught.value.todo


def test_those_of_real_models_are_not() -> None:
    sizes = {"hidden_size": 16384, "intermediate_size": 53248, "vocab_size": 262144, "head_dim": 256}
    counts = {"num_hidden_layers": 126, "num_local_experts": 256, "max_position_embeddings": 10485760}
    check_numbers(sizes | counts | {"rope_theta": 5e5}, "config.json")


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
