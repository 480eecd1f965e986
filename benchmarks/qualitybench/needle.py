"""A key of random digits somewhere in a long text, and whether it is copied at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import runtime

NUM_DIGITS = 12
NEEDLE = "\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? The pass key is"
ROOM = 120  # tokens for the needle and the question


@dataclass(frozen=True)
class Case:
    depth: float  # of the needle: 0 the start, 1 the end
    key: str
    prompt: tuple[int, ...]


def cases(engine: Path, text: str, context: int, depths: int, seeds: Sequence[int]) -> Iterator[Case]:
    """For each seed a new key and piece of the text at each depth, `context` tokens at most.

    Raises ValueError where the text is too short.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(engine / "tokenizer" / "tokenizer.json"))
    encode = lambda part: tokenizer.encode(part, add_special_tokens=False).ids  # noqa: E731
    hay, size = encode(text), context - ROOM
    if len(hay) <= size:
        raise ValueError(
            f"the text has {len(hay):,} tokens; a context of {context:,} needs more than {size:,}"
        )
    for seed in seeds:
        rng = np.random.default_rng(seed)
        for depth in np.linspace(0, 1, depths):
            key = "".join(str(digit) for digit in rng.integers(0, 10, NUM_DIGITS))
            start = int(rng.integers(0, len(hay) - size))
            at = start + int(depth * size)
            told = encode(NEEDLE.format(key=key))
            ids = [*hay[start:at], *told, *hay[at : start + size], *encode(QUESTION)]
            assert len(ids) <= context
            yield Case(float(depth), key, tuple(ids))


def copied(engine: Path, asked: Sequence[Case], threads: int) -> list[str]:
    """The digits that follow each prompt, greedily."""
    with runtime.load(engine, threads=threads, prefix_cache=False) as loaded:
        return [_answer(loaded, case) for case in asked]


def _answer(engine: runtime.Engine, case: Case) -> str:
    completion = runtime.generate(engine, [list(case.prompt)], max_new_tokens=NUM_DIGITS + 6, ignore_eos=True)
    assert isinstance(completion, list)
    said = completion[0].text.lstrip()
    return said[: next((i for i, letter in enumerate(said) if not letter.isdigit()), len(said))]


def told(asked: Sequence[Case], answers: Sequence[str]) -> dict[str, Any]:
    """Keys copied exactly, in all and by depth, the share of right digits, and what was said instead."""
    exact = {case.depth: [0, 0] for case in asked}
    digits = 0
    for case, answer in zip(asked, answers, strict=True):
        exact[case.depth][0] += answer[:NUM_DIGITS] == case.key
        exact[case.depth][1] += 1
        digits += sum(a == b for a, b in zip(case.key, answer, strict=False))
    return {
        "num_cases": len(asked),
        "exact": sum(hits for hits, _ in exact.values()),
        "digit_share": digits / (len(asked) * NUM_DIGITS),
        "by_depth": {f"{depth:.2f}": hits / count for depth, (hits, count) in exact.items()},
        "missed": [
            (c.depth, c.key, a) for c, a in zip(asked, answers, strict=True) if a[:NUM_DIGITS] != c.key
        ],
    }
