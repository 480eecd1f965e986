"""What is asked for: chat prompts, versions of a text with small changes, random tokens, tokens that repeat
by chance alone, sixteen at once."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from runtime import Engine

DATA = Path(__file__).parents[2] / "tests" / "data" / "smollm2_greedy.json"
TEXT = Path(__file__).parents[2] / "compiler" / "quantization" / "texts" / "heldout.txt"
COPIED_WORDS, BEGUN_WORDS, SIXTEEN, FEW = 90, 12, 16, 20
ANY = "*"


@dataclass(frozen=True)
class Workload:
    """prompts: requests one after another, or all at once. sampling: where it differs from greedy.
    at_least: of the speed without drafts, how much is promised by what drafts, ANY for all others."""

    name: str
    prompts: list[Any]
    new_tokens: int
    at_once: bool = False
    at_least: Mapping[str, float] = field(default_factory=dict[str, float])
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def bound(self, draft: str, asked: float | None = None) -> float | None:
        """What was asked for, or else is promised of a drafter."""
        return self.at_least.get(draft, self.at_least.get(ANY)) if asked is None else asked


def chat(engine: Engine, new_tokens: int) -> Workload:
    """The chat prompts that the tests compare with another implementation."""
    promised = {"f32": 1.6, "bf16": 1.2}.get(engine.model.dtype)
    return Workload("chat", _chats(), new_tokens, at_least={} if promised is None else {"self": promised})


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
    return Workload("copy", prompts, min(new_tokens, *rests), at_least={"lookup": 2.5})


def random(engine: Engine, new_tokens: int) -> Workload:
    """Prompts of random tokens: what follows is seldom found in them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, engine.model.vocab_size, (4, 256)).tolist()
    return Workload("random", ids, new_tokens, at_least={"lookup": 0.95})


def chance(engine: Engine, new_tokens: int) -> Workload:
    """Random tokens of FEW, in the prompt and, by their bias and a high temperature, in the output: nearly
    every two that come stood in the prompt before, and what followed them there follows seldom again."""
    rng = np.random.default_rng(1)
    few = rng.choice(engine.model.vocab_size, FEW, replace=False)
    ids = rng.choice(few, (2, 2 * FEW * FEW)).tolist()
    flat = {"temperature": 5.0, "logit_bias": dict.fromkeys(few.tolist(), 100.0)}
    return Workload("chance", ids, new_tokens, at_least={"lookup": 0.95}, sampling=flat)


def sixteen(engine: Engine, new_tokens: int) -> Workload:
    """The chat prompts at once, each two or three times."""
    chats = [*_chats(), *_chats(), *_chats()][:SIXTEEN]
    return Workload("sixteen", chats, new_tokens, at_once=True, at_least={ANY: 0.95})


WORKLOADS = {"chat": chat, "copy": copy, "random": random, "chance": chance, "sixteen": sixteen}


def _chats() -> list[Any]:
    cases = json.loads(DATA.read_text())["cases"]
    return [[{"role": "user", "content": c["prompt"]}] for c in cases if c["kind"] == "chat"]
