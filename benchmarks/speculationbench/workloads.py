"""What is asked for: chat prompts, versions of a text with small changes, random tokens, sixteen at once."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from runtime import Engine

DATA = Path(__file__).parents[2] / "tests" / "data" / "smollm2_greedy.json"
TEXT = Path(__file__).parents[2] / "compiler" / "quantization" / "texts" / "heldout.txt"
COPIED_WORDS, BEGUN_WORDS, SIXTEEN = 90, 12, 16


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
    """Prompts with two versions of a text, of which one word differs, that end where a third has begun. As
    many tokens are asked for as the shortest rest has: a small model copies well what it saw twice."""
    words, tokenizer = TEXT.read_text().split(), engine.tokenizer
    assert tokenizer is not None
    prompts: list[Any] = []
    rests: list[int] = []
    for start in range(0, 4 * COPIED_WORDS, COPIED_WORDS):
        text = " ".join(words[start : start + COPIED_WORDS])
        edited = text.replace(" the ", " this ", 1)
        begun = " ".join(edited.split()[:BEGUN_WORDS])
        versions = enumerate((text, edited, begun), 1)
        prompts.append("\n\n".join(f"Version {number}:\n{version}" for number, version in versions))
        rests.append(len(tokenizer.encode(edited[len(begun) :], add_special_tokens=False)))
    return Workload("copy", prompts, min(new_tokens, *rests), at_least=2.5)


def random(engine: Engine, new_tokens: int) -> Workload:
    """Prompts of random tokens: what follows is seldom found in them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, engine.model.vocab_size, (4, 256)).tolist()
    return Workload("random", ids, new_tokens, at_least=0.95)


def sixteen(engine: Engine, new_tokens: int) -> Workload:
    """The chat prompts at once, each two or three times."""
    chats = [*_chats(), *_chats(), *_chats()][:SIXTEEN]
    return Workload("sixteen", chats, new_tokens, at_once=True, at_least=0.95)


WORKLOADS = {"chat": chat, "copy": copy, "random": random, "sixteen": sixteen}


def _chats() -> list[Any]:
    cases = json.loads(DATA.read_text())["cases"]
    return [[{"role": "user", "content": c["prompt"]}] for c in cases if c["kind"] == "chat"]
