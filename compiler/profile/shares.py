"""The shares of the machine's bounds that an engine's throughput reaches."""

from __future__ import annotations

from dataclasses import dataclass

from codegen.costs import Costs, StepShape
from compiler.profile.limits import Limits, products_s
from compiler.profile.run import costs_of
from runtime.artifact import Artifact


@dataclass(frozen=True)
class Throughput:
    """What was measured of requests that come together, each of one size, and get `new_tokens` each.

    prefill_s: until every request has its first new token. decode_s, decode_tokens: from then on.
    """

    num_requests: int
    prompt_tokens: int
    context_tokens: int  # cached, before the prompt
    new_tokens: int
    prefill_s: float
    decode_s: float
    decode_tokens: int


def shares(artifact: Artifact, found: Throughput, limits: Limits) -> dict[str, float]:
    """bandwidth_share of decode, peak_share of prefill."""
    costs = costs_of(artifact)
    return {
        "bandwidth_share": limits.read_s(_decode_bytes(costs, found)) / found.decode_s,
        "peak_share": _prefill_s(costs, found, limits) / found.prefill_s,
    }


def _decode_bytes(costs: Costs, found: Throughput) -> float:
    """Weights once a step and, for each token, the keys and values of its context, at the decode's middle."""
    middle = found.context_tokens + found.prompt_tokens + (found.new_tokens + 1) // 2
    step = costs.step(StepShape((1,), (middle,), 1))
    weight_bytes = sum(cost.weight_bytes for cost in step)
    kv_bytes = sum(cost.kv_bytes for cost in step)
    return weight_bytes * (found.new_tokens - 1) + kv_bytes * found.decode_tokens


def _prefill_s(costs: Costs, found: Throughput, limits: Limits) -> float:
    """What the prompts' arithmetic takes at the peak rate, however they are cut into steps."""
    length, requests = found.context_tokens + found.prompt_tokens, found.num_requests
    shape = StepShape((found.prompt_tokens,) * requests, (length,) * requests, requests)
    return products_s(limits, costs.step(shape))
