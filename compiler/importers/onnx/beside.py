"""What stands beside an ONNX model: a tokenizer, and configurations that say its context and end tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiler.files import check_links
from compiler.importers.configuration import read_json, token_ids
from compiler.importers.model import MAX_CONTEXT
from compiler.importers.tokenizer import tokenizer_files

_LENGTHS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx", "context_length")


class Beside:
    """Of a model in a folder `onnx`, what is in the folder above it."""

    def __init__(self, path: Path) -> None:
        here = path.parent
        above = here.name == "onnx" and (here.parent / "config.json").is_file()
        self.directory = here.parent if above else here
        check_links(self.directory)
        config = read_json(self.directory / "config.json")
        built = read_json(self.directory / "genai_config.json").get("model")
        self._config: dict[str, Any] = {**(built if isinstance(built, dict) else {}), **config}
        generation = read_json(self.directory / "generation_config.json")
        self.eos = (*token_ids(generation.get("eos_token_id")), *token_ids(self._config.get("eos_token_id")))
        self.bos = token_ids(self._config.get("bos_token_id"))

    @property
    def context(self) -> int | None:
        """Tokens of the longest sequence; None where nothing says it."""
        found = (self._config.get(name) for name in _LENGTHS)
        return next((n for n in found if type(n) is int and 0 < n <= MAX_CONTEXT), None)

    def tokenizer(self) -> dict[str, bytes]:
        return tokenizer_files(self.directory)


def context_beside(path: Path) -> int | None:
    return Beside(path).context
