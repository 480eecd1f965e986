"""What quantisation cost a model, from its manifest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WORST = 5  # layers that are listed


def quality(entry: Mapping[str, Any] | None) -> list[str]:
    """Lines on a manifest's model.quantization; none where nothing is quantised."""
    if entry is None:
        return []
    found = [_formats(entry)]
    error = entry["error"]
    if error is None:
        return [*found, "not measured"]
    kl, p99, ratio = (_shown(error[k]) for k in ("mean_kl", "p99_kl", "perplexity_ratio"))
    agreement = error["top1_agreement"]
    found.append(
        f"mean KL {kl} nats, 99th percentile {p99}, top-1 agreement {agreement:.1%}, perplexity times "
        f"{ratio}, over {error['positions']:,} positions of {error['text']}; bound {entry['max_kl']:.4g}"
    )
    layers = sorted(error["layers"], key=lambda e: e["relative_error"] or math.inf, reverse=True)
    found += [f"{_share(e)} {e['format']} {e['layer']}" for e in layers[:WORST]]
    rest = len(layers) - WORST
    return [*found, f"and {rest} layers of less error (--json lists all)"] if rest > 0 else found


def _formats(entry: Mapping[str, Any]) -> str:
    weights = entry["weights"]
    if weights != "none":
        group = f" in groups of {entry['group']}" if entry["group"] else " per channel"
        weights += f"{group if weights != 'fp8' else ' per channel'} by {entry['algorithm']}"
    raised = f"; {len(entry['raised'])} layers raised" if entry["raised"] else ""
    return f"weights {weights}, activations {entry['activations']}, kv {entry['kv'] or 'plain'}{raised}"


def _shown(x: float | None) -> str:
    return "infinite" if x is None else f"{x:.4g}"


def _share(layer: Mapping[str, Any]) -> str:
    error = layer["relative_error"]
    return "infinite" if error is None else f"{error:.2%}"
