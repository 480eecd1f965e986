"""What quantisation cost, in the manifest's words and in a person's."""

from __future__ import annotations

import math
from typing import Any

from compiler.errors import CompileError
from compiler.quantization.decide import Decided
from compiler.quantization.gate import Divergence, Measured
from compiler.quantization.options import NONE, OWN, Quantization
from compiler.quantization.text import RANDOM

WORST = 5  # layers that a refusal names


def entry(asked: Quantization, decided: Decided) -> dict[str, Any]:
    """The manifest's model.quantization. error: None where there were no weights to measure with.

    group, algorithm: None where no weight was rounded here.
    """
    rounds = asked.weights not in (NONE, OWN)
    return {
        "weights": asked.weights,
        "group": decided.weights.group_size if rounds else None,
        "algorithm": asked.algorithm if rounds else None,
        "nearest": list(decided.nearest),
        "symmetric": asked.symmetric,
        "activations": asked.activations,
        "kv": asked.kv,
        "raised": list(decided.raised),
        "max_kl": asked.limit(),
        "error": None if decided.measured is None else _error(decided.measured),
    }


def divergence_entry(found: Divergence, text: str) -> dict[str, Any]:
    """As a manifest has it. text: what it was measured on."""
    return {
        "text": text,
        "positions": found.positions,
        "mean_kl": _number(found.mean_kl),
        "p99_kl": _number(found.p99_kl),
        "top1_agreement": _number(found.top1),
        "perplexity_ratio": _number(found.perplexity_ratio),
    }


def _error(measured: Measured) -> dict[str, Any]:
    return {
        **divergence_entry(measured.divergence, measured.text),
        "layers": [
            {"layer": e.loc, "format": e.format, "relative_error": _number(e.error), "weights": e.weights}
            for e in measured.layers
        ],
    }


def _number(x: float) -> float | None:
    """As JSON has it, which knows no NaN."""
    return float(f"{x:.4g}") if math.isfinite(x) else None


def figures(found: Divergence) -> str:
    return (
        f"mean KL {found.mean_kl:.4g} nats, 99th percentile {found.p99_kl:.3g}, top-1 agreement "
        f"{found.top1:.1%}, perplexity times {found.perplexity_ratio:.4g}"
    )


def check(asked: Quantization, decided: Decided) -> None:
    """Raises CompileError where the quantised model is too far from what it was.

    Random tokens say nothing of the quality on text: by them only a bound that was given refuses.
    """
    measured = decided.measured
    if measured is None or (measured.text == RANDOM and asked.max_kl is None):
        return
    if measured.divergence.mean_kl <= asked.limit():
        return
    worst = sorted(measured.layers, key=lambda e: e.error, reverse=True)[:WORST]
    named = "".join(f"\n  {e.error:7.2%}  {e.format:8} {e.loc}" for e in worst)
    raise CompileError(
        f"quantised, the model is too far from what it was: {figures(measured.divergence)}; the bound is "
        f"{asked.limit():.4g}",
        where="--max-kl",
        todo=_todo(asked, list(dict.fromkeys(e.loc for e in worst))),
        shown=f"The layers of the largest error of their outputs, over {measured.text}:{named}"
        if worst
        else "",
    )


def _todo(asked: Quantization, worst: list[str]) -> str:
    ways = ["allow more with --max-kl"]
    if asked.kv in ("int4", "int2"):
        ways.insert(0, "give --kv int8")
    if worst and asked.weights == "int4":
        keep = f"keep the worst layers with --keep {','.join(worst[:2])}"
        ways[:0] = [
            "give --quantize auto or int8",
            *(["--algorithm gptq"] * (asked.algorithm != "gptq")),
            keep,
        ]
    text = ", or ".join(ways)
    return text[:1].upper() + text[1:]
