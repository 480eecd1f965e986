"""`--quantize auto`: int4 where it does little harm, and more where it does, until the whole model fits its
bound.

The KL of small errors is about the sum of what the layers add, each its own output's squared error.
Measured once for all of int4, its shares say how far the layers of most error per byte have to be raised;
measured again, what is left says how much further.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from compiler.quantization import text
from compiler.quantization.decide import Decided
from compiler.quantization.layers import LayerError
from compiler.quantization.options import NONE

NEXT = {"int4": "int8", "int8": NONE, "fp8": NONE}
LEFT = {"int4": 1 / 250, "int8": 0.0, "fp8": 0.0}  # of a layer's squared error once it is raised
AIM = 0.9  # of the bound: shares are estimates
ROUNDS = 8


class Decides(Protocol):
    def measured(self, decided: Decided, windows: text.Windows) -> Decided: ...

    def raised(self, decided: Decided, formats: Mapping[str, str]) -> Decided: ...


def raise_until(decision: Decides, decided: Decided, windows: text.Windows, bound: float) -> Decided:
    """A decision that was measured, with the worst layers raised until its KL is within the bound.

    It may not be in the end: where nothing is left to raise, or after ROUNDS.
    """
    for _ in range(ROUNDS):
        measured = decided.measured
        if measured is None or measured.divergence.mean_kl <= bound:
            break
        chosen = worst_layers(measured.layers, decided.formats, measured.divergence.mean_kl, AIM * bound)
        if not chosen:
            break
        formats = {name: NEXT[f] if name in chosen else f for name, f in decided.formats.items()}
        decided = decision.measured(decision.raised(decided, formats), windows)
    return decided


def worst_layers(
    layers: Sequence[LayerError], formats: Mapping[str, str], kl: float, aim: float
) -> list[str]:
    """Names of the matrices to raise, those first that add most squared error per weight.

    As many as bring a KL of `kl` down to `aim`, if each layer's share of it is its share of all squared
    errors.
    """
    errors: dict[str, tuple[float, int]] = {}
    for layer in layers:
        before = errors.get(layer.matrix, (0.0, layer.weights))
        errors[layer.matrix] = before[0] + layer.error**2, layer.weights
    total = sum(error for error, _ in errors.values())
    candidates = [name for name in errors if formats.get(name, NONE) != NONE]
    order = sorted(candidates, key=lambda name: errors[name][0] / errors[name][1], reverse=True)
    chosen: list[str] = []
    for name in order:
        if kl <= aim or not total:
            break
        chosen.append(name)
        kl -= kl_share(errors[name][0], formats[name], total) * kl
        total -= errors[name][0] * (1 - LEFT[formats[name]])
    return chosen


def kl_share(error: float, format: str, total: float) -> float:
    """Of the KL, that goes when a layer of this squared error is raised."""
    return error * (1 - LEFT[format]) / total
