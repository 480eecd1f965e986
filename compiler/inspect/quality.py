"""What quantisation cost a model, from its manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from runtime.errors import MAX_PART, one_line, shorten

WORST = 5  # layers that are listed


def quality(entry: Mapping[str, Any] | None) -> list[str]:
    """Lines on a manifest's model.quantization; none where nothing is quantised."""
    if entry is None:
        return []
    try:
        return [shorten(one_line(text), MAX_PART) for text in (_formats(entry), *_error(entry))]
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return ["in a way that this version cannot read (--json shows it)"]


def draft_quality(entry: Mapping[str, Any] | None) -> list[str]:
    """Lines on the quantisation of a draft."""
    if entry is None:
        return []
    try:
        group = f" in groups of {entry['group']}" if entry["group"] else ""
        how = f"{group} by {entry['algorithm']}{_nearest(entry)}"
        lines = [
            f"{entry['weights']}{how}, activations {entry['activations']}",
            _agreement(entry["error"]),
        ]
        return [shorten(one_line(text), MAX_PART) for text in lines]
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        return ["in a way that this version cannot read (--json shows it)"]


def _agreement(error: Mapping[str, Any] | None) -> str:
    if error is None:
        return "not measured"
    found = f"top-1 agreement {error['top1_agreement']:.1%}, mean KL {_shown(error['mean_kl'])} nats"
    return f"beside the model: {found}, over {error['positions']:,} positions of {error['text']}"


def _error(entry: Mapping[str, Any]) -> list[str]:
    error = entry["error"]
    if error is None:
        return ["not measured"]
    kl, p99, ratio = (_shown(error[k]) for k in ("mean_kl", "p99_kl", "perplexity_ratio"))
    agreement, positions = f"{error['top1_agreement']:.1%}", f"{error['positions']:,}"
    found = (
        f"mean KL {kl} nats, 99th percentile {p99}, top-1 agreement {agreement}, perplexity times {ratio}, "
        f"over {positions} positions of {error['text']}; bound {entry['max_kl']:.4g}"
    )
    layers = sorted(error["layers"], key=_layer_error, reverse=True)
    shown = [f"{_share(e)} {e['format']} {e['layer']}" for e in layers[:WORST]]
    shown[:0] = ["relative error of outputs, each layer alone; the largest:"] * bool(shown)
    rest = len(layers) - WORST
    return [found, *shown, *[f"and {rest} layers of less error (--json lists all)"] * (rest > 0)]


def _layer_error(layer: Mapping[str, Any]) -> float:
    return math.inf if layer["relative_error"] is None else layer["relative_error"]


def _formats(entry: Mapping[str, Any]) -> str:
    weights = entry["weights"]
    if weights == "own":
        weights += " (the checkpoint's codes)"
    elif weights != "none":
        group = f" in groups of {entry['group']}" if entry["group"] else " per channel"
        weights += f"{group} by {entry['algorithm']}{_nearest(entry)}"
    raised = f"; {len(entry['raised'])} matrices raised" if entry["raised"] else ""
    return f"weights {weights}, activations {entry['activations']}, kv {entry['kv'] or 'plain'}{raised}"


def _nearest(entry: Mapping[str, Any]) -> str:
    """What was not fitted. Older manifests do not say it."""
    count = len(entry.get("nearest", ()))
    return f" ({count} stack{'s' if count > 1 else ''} of experts by rtn)" if count else ""


def _shown(x: float | None) -> str:
    return "infinite" if x is None else f"{x:.4g}"


def _share(layer: Mapping[str, Any]) -> str:
    error = layer["relative_error"]
    return "infinite" if error is None else f"{error:.2%}"
