"""A checkpoint's config.json: what can be refused in it, the configuration that it makes, and token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compiler.files import MAX_CONFIG_BYTES, check_links, read_file
from compiler.importers.config_limits import check_numbers
from compiler.importers.export import quiet
from compiler.importers.model import MAX_CONTEXT
from compiler.importers.quantized.detect import check_method
from compiler.importers.refused import ImportRefused, one_line
from runtime.errors import shorten

CHECK = "Check its fields, and that transformers is new enough for the model"

_POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
    "seq_length",
)


def check_config(directory: Path) -> None:
    """Raises ImportRefused on remote code, and on weights that are quantised in a way that is not read."""
    check_links(directory)
    raw = read_json(directory / "config.json", required=True)
    if raw.get("auto_map"):
        raise ImportRefused(
            "the checkpoint brings its own model code (auto_map), which is never run",
            where=f"{directory}/config.json",
            todo="If transformers has the model type itself, remove auto_map from a copy of config.json",
        )
    if raw.get("quantization_config"):
        check_method(raw["quantization_config"], f"{directory}/config.json")
    check_numbers(raw, f"{directory}/config.json")


def read_config(directory: Path) -> Any:
    """The configuration of a checkpoint. Raises ImportRefused on remote code and unknown model types."""
    check_config(directory)
    from transformers import AutoConfig

    with quiet():
        try:
            config: Any = AutoConfig.from_pretrained(
                str(directory), trust_remote_code=False, local_files_only=True
            )
        except Exception as error:  # whatever a wrong field makes of the many configuration classes
            what = f"transformers does not know this model: {one_line(error)}"
            raise ImportRefused(what, where=f"{directory}/config.json", todo=CHECK) from error
    if hasattr(config, "quantization_config"):  # the model is made as if it was not: weights are read here
        del config.quantization_config
    return config


def config_context(config: Any, where: str = "config.json") -> int:
    """The context that a configuration promises. Raises ImportRefused where it promises none."""
    for key in _POSITIONS:
        found = getattr(config, key, None)
        if type(found) is int and 0 < found <= MAX_CONTEXT:  # and not true
            return found
        if type(found) is int and found > MAX_CONTEXT:
            what = f"{key} = {shorten(str(found))}"
            raise ImportRefused(what, where=where, todo="Give a smaller one with --max-context N")
    what = "it has no maximum number of positions"
    raise ImportRefused(what, where=where, todo="Give one with --max-context N")


def inside(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Those that are tokens, each once. Others, often a configuration class's defaults, never occur."""
    return tuple(dict.fromkeys(i for i in ids if 0 <= i < vocab_size))


def token_ids(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    values: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
    found = tuple(v for v in values if v is not None)
    if not all(type(v) is int for v in found):
        raise ImportRefused(
            f"bos_token_id or eos_token_id is {shorten(repr(value))}; they are token ids",
            where="config.json or generation_config.json",
            todo="Correct it in the checkpoint",
        )
    return found


def read_json(path: Path, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ImportRefused(
                "it is missing", where=str(path), todo="Give a directory that has one beside its weights"
            )
        return {}
    try:
        found = json.loads(read_file(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        what = f"not valid JSON: {shorten(str(error), 200)}"
        raise ImportRefused(what, where=str(path), todo="Download the checkpoint again") from None
    if not isinstance(found, dict):
        raise ImportRefused("not a JSON object", where=str(path), todo="Download the checkpoint again")
    return found
