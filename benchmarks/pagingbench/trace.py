"""The trace: 200 requests with long-tailed lengths, drawn once and kept in benchmarks/data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

TRACE = Path(__file__).parents[1] / "data" / "trace-200.json"
COUNT, SEED = 200, 20
PROMPT, OUTPUT = (1_000, 128, 1.0), (500, 96, 1.0)  # most tokens, median, sigma of the logarithm


@dataclass(frozen=True)
class Length:
    prompt: int
    output: int


def read(path: Path = TRACE) -> list[Length]:
    return [Length(*pair) for pair in json.loads(path.read_text())["requests"]]


def write(path: Path = TRACE) -> None:
    """Draw it again: log-normal lengths; what is outside of 1 to the most is drawn anew."""
    rng = np.random.default_rng(SEED)
    pairs = [[_draw(rng, *PROMPT), _draw(rng, *OUTPUT)] for _ in range(COUNT)]
    names = ("most", "median", "sigma")
    facts = {
        "what": "[prompt tokens, output tokens] of requests, log-normal, drawn anew outside of 1 to the most",
        "seed": SEED,
        "prompt": dict(zip(names, PROMPT, strict=True)),
        "output": dict(zip(names, OUTPUT, strict=True)),
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts)[:-1] + ',\n "requests": [\n' + _lines(pairs) + "\n]}\n")


def _lines(pairs: list[list[int]]) -> str:
    rows = [pairs[at : at + 10] for at in range(0, len(pairs), 10)]
    return ",\n".join(" " + json.dumps(row)[1:-1] for row in rows)


def _draw(rng: np.random.Generator, most: int, median: float, sigma: float) -> int:
    while True:
        value = round(median * float(np.exp(sigma * rng.standard_normal())))
        if 1 <= value <= most:
            return value
