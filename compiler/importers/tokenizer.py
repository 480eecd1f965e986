"""The tokenizer's files of a checkpoint, as an artifact has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from compiler.files import MAX_TOKENIZER_BYTES, read_file
from compiler.importers.export import quiet
from compiler.importers.refused import ImportRefused, one_line

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)

_SLOW_TOKENIZERS = ("tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")


def tokenizer_files(directory: Path) -> dict[str, bytes]:
    there = [name for name in TOKENIZER_FILES if (directory / name).is_file()]
    found = {name: read_file(directory / name, MAX_TOKENIZER_BYTES) for name in there}
    if "tokenizer.json" in found or not any((directory / n).is_file() for n in _SLOW_TOKENIZERS):
        return found
    return {**found, **convert_tokenizer(directory)}


def convert_tokenizer(directory: Path, **options: Any) -> dict[str, bytes]:
    """The files of a tokenizer as transformers saves its fast form."""
    import tempfile

    from transformers import AutoTokenizer

    with quiet(), tempfile.TemporaryDirectory() as out:
        try:
            tokenizer = AutoTokenizer.from_pretrained(
                str(directory), trust_remote_code=False, local_files_only=True, use_fast=True, **options
            )
            tokenizer.save_pretrained(out)
        except Exception as error:  # whatever the conversion code of the many tokenizers raises
            raise ImportRefused(
                f"transformers cannot convert the tokenizer to tokenizer.json: {one_line(error)}",
                where=str(directory),
                todo="Add a tokenizer.json, or remove the tokenizer's files: prompts are token ids then",
            ) from error
        return {n: (Path(out) / n).read_bytes() for n in TOKENIZER_FILES if (Path(out) / n).is_file()}
