"""What is asked for: chat prompts, a text to copy with a small change, random tokens, and sixteen at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime import Engine

DATA = Path(__file__).parents[2] / "tests" / "data" / "smollm2_greedy.json"
TEXT = Path(__file__).parents[2] / "compiler" / "quantization" / "texts" / "heldout.txt"
COPIED_WORDS, SIXTEEN = 110, 16


@dataclass(frozen=True)
class Workload:
    """prompts: requests one after another, or all at once. at_least: of the speed without drafts, how much is
    promised for the drafter that it is for (None: nothing)."""

    name: str
    prompts: list[Any]
    new_tokens: int
    at_once: bool = False
    at_least: float | None = None


def chat(engine: Engine, new_tokens: int) -> Workload:
    """The chat prompts that the tests compare with another implementation."""
    return Workload("chat", _chats(), new_tokens)


def copy(engine: Engine, new_tokens: int) -> Workload:
    """Prompts that end where the copy of a text has begun, so that any model goes on with it."""
    words = TEXT.read_text().split()
    prompts: list[Any] = []
    for start in range(0, 4 * COPIED_WORDS, COPIED_WORDS):
        text = " ".join(words[start : start + COPIED_WORDS])
        edited = text.replace(" the ", " this ", 1)
        begun = " ".join(edited.split()[:12])
        prompts.append(f"The text:\n{text}\n\nThe same text with one word changed:\n{begun}")
    return Workload("copy", prompts, min(new_tokens, 128), at_least=2.5)


def random(engine: Engine, new_tokens: int) -> Workload:
    """Prompts of random tokens: what follows is seldom found in them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, engine.model.vocab_size, (4, 256)).tolist()
    return Workload("random", ids, new_tokens, at_least=0.95)


def sixteen(engine: Engine, new_tokens: int) -> Workload:
    chats = [*_chats(), *_chats(), *_chats()][:SIXTEEN]
    return Workload("sixteen", chats, new_tokens, at_once=True, at_least=0.95)


WORKLOADS = {"chat": chat, "copy": copy, "random": random, "sixteen": sixteen}


def _chats() -> list[Any]:
    cases = json.loads(DATA.read_text())["cases"]
    return [[{"role": "user", "content": c["prompt"]}] for c in cases if c["kind"] == "chat"]
