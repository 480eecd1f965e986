"""The gate: how far a quantised model is from the model as it was, on text that nothing was fitted to.

Both are run in the reference interpreter, on the same windows of tokens. Compiled code computes the same
numbers, so nothing need be built to know them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compiler.quantization.grid import Array
from compiler.quantization.layers import LayerError, LayerErrors
from compiler.quantization.text import Windows, num_blocks, packed
from ir.graph import Graph
from ir.interpret import Compute, WeightReader, empty_kv
from ir.stream import stream
from ir.types import KV

EVERY = 2  # logits are compared at every so many tokens: they are most of the work
P99 = 0.99
Report = Callable[[int, int], None]


@dataclass(frozen=True)
class Divergence:
    """Of a model's next tokens from another's, over a text: KL(other || model), in nats.

    top1: share of positions where both think the same token the likeliest. perplexity_ratio: the model's over
    the other's.
    """

    mean_kl: float
    p99_kl: float
    top1: float
    perplexity_ratio: float
    positions: int


@dataclass(frozen=True)
class Measured:
    """What the gate knows: the divergence, each layer's error, and the text that they were measured on."""

    divergence: Divergence
    layers: tuple[LayerError, ...]
    text: str


@dataclass
class Comparison:
    """Adds up logits of two models, position by position."""

    kl: list[Array] = field(default_factory=list[Array])
    same: int = 0
    surprise: float = 0.0  # nats that the second model adds on the tokens that follow
    followed: int = 0

    def add(self, expected: Array, found: Array, following: Array) -> None:
        """Logits [Q, V] each. following: the token after each position, -1 where there is none."""
        p, q = log_softmax(expected), log_softmax(found)
        self.kl.append((np.exp(p) * (p - q)).sum(-1, dtype=np.float64))
        self.same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        known = np.flatnonzero(following >= 0)
        self.surprise += float((p - q)[known, following[known]].sum(dtype=np.float64))
        self.followed += len(known)

    def result(self) -> Divergence:
        kl = np.concatenate(self.kl)
        with np.errstate(over="ignore"):
            ratio = float(np.exp(self.surprise / max(self.followed, 1)))
        return Divergence(float(kl.mean()), float(np.quantile(kl, P99)), self.same / len(kl), ratio, len(kl))


def log_softmax(x: Array) -> Array:
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def measure(
    expected: Graph,
    found: Graph,
    read: WeightReader,
    text: Windows,
    report: Report = lambda done, total: None,
) -> Measured:
    """Of `found` from `expected`: both paged, with the same names for what is the same."""
    total, layers = Comparison(), LayerErrors(expected, found, read)
    for index, ids in enumerate(text.ids):
        first = logits_of(expected, read, ids, layers.compute)
        report(2 * index + 1, 2 * len(text.ids))
        total.add(first, logits_of(found, read, ids), np.append(ids[1:], -1)[::EVERY])
        report(2 * index + 2, 2 * len(text.ids))
    return Measured(total.result(), layers.result(), text.source)


def divergence(
    expected: Graph,
    read_expected: WeightReader,
    found: Graph,
    read_found: WeightReader,
    text: Windows,
    report: Report = lambda done, total: None,
) -> Divergence:
    """Of `found` from `expected`, whatever they have in common."""
    total = Comparison()
    for index, ids in enumerate(text.ids):
        first = logits_of(expected, read_expected, ids)
        report(2 * index + 1, 2 * len(text.ids))
        total.add(first, logits_of(found, read_found, ids), np.append(ids[1:], -1)[::EVERY])
        report(2 * index + 2, 2 * len(text.ids))
    return total.result()


def logits_of(graph: Graph, read: WeightReader, ids: Array, compute: Compute | None = None) -> Array:
    """[Q, V] of one window, at every EVERY-th position."""
    states = {v.name: v.type for v in graph.inputs if isinstance(v.type, KV)}
    inputs: dict[str, Any] = packed([ids], {name: kv.block for name, kv in states.items()}, EVERY)
    inputs |= {name: empty_kv(kv, num_blocks([ids], kv.block)) for name, kv in states.items()}
    logits = graph.outputs[0].name
    return stream(graph, inputs, read, [logits], compute)[logits]
