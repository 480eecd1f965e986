"""Numbers of a configuration that would make transformers build models without end, before it does."""

from __future__ import annotations

import re
from typing import Any

from compiler.importers.refused import ImportRefused
from runtime.errors import shown

MAX_NUMBER = 2**31
MOST = (  # a module is made for each of the first, often of the second, and a name for each of the last
    (re.compile(r"(^|_)(layer|block|branch|stage|depth)(e?s)?$", re.IGNORECASE), 1024),
    (re.compile(r"(^|_)experts?$", re.IGNORECASE), 2**16),  # some are rows of one table
    (re.compile(r"hidden|head|embd|embed_dim|model|inner|intermediate|ffn|rank|_dim$", re.IGNORECASE), 2**20),
    (re.compile(r"labels", re.IGNORECASE), 2**13),
)  # fmt: skip
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
    return next((most for pattern, most in MOST if pattern.search(key)), MAX_NUMBER)
