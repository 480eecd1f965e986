"""Numbers of a configuration that would make transformers build models without end, before it does."""

from __future__ import annotations

import re
from typing import Any

from compiler.importers.refused import ImportRefused
from runtime.errors import shown

MAX_NUMBER = 2**31
COUNTED = re.compile(r"layer|expert|block|branch|stage|depth", re.IGNORECASE)  # a module is made for each
MAX_COUNT = 4096
SIZES = re.compile(r"hidden|head|embd|embed_dim|d_model|inner|intermediate|ffn|rank|_dim$", re.IGNORECASE)
MAX_SIZE = 2**20
TODO = "Correct it in a copy of the checkpoint"


def check_numbers(config: Any, where: str) -> None:
    """config: as a dictionary. Raises ImportRefused at a number that no model has."""
    waiting: list[tuple[str, Any]] = [("config.json", config)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(str(k), v) for k, v in value.items()]
        elif isinstance(value, list | tuple):
            waiting += [(key, v) for v in value]
        elif type(value) is int and abs(value) > most(key):
            raise ImportRefused(
                f"{shown(key)} is {shown(value)}: at most {most(key):,}", where=where, todo=TODO
            )


def most(key: str) -> int:
    """What a number of this name may be."""
    if COUNTED.search(key):
        return MAX_COUNT
    return MAX_SIZE if SIZES.search(key) else MAX_NUMBER
