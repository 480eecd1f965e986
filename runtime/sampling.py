"""How tokens are chosen and when to stop: the parameters of one request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

from runtime.errors import RequestError

MAX_LOGPROBS = 1000
MIN_TEMPERATURE = 1e-5  # below, logits / temperature leaves what 32-bit floats resolve
MAX_SAMPLES = 1024


@dataclass(frozen=True)
class Sampling:
    """Parameters of one request; checked when made (RequestError).

    max_new_tokens: 0 scores the prompt only. temperature: 0 is greedy. top_k: 0 keeps all. top_p: 1 keeps
    all. min_p: keeps tokens at least this fraction as likely as the likeliest. seed: 64 bits; None draws one,
    which the completion reports. stop: texts that end the output and are left out of it. stop_token_ids: like
    the model's end tokens, which ignore_eos disregards. logprobs, prompt_logprobs: None, or how many
    alternatives to report per token. n: samples per prompt.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        _integer("max_new_tokens", self.max_new_tokens, 0, 2**31 - 1)
        _number("temperature", self.temperature, 0.0 if self.temperature == 0 else MIN_TEMPERATURE, 1e6)
        _integer("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 1e-9, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("n", self.n, 1, MAX_SAMPLES)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise _bad("ignore_eos", self.ignore_eos, "True or False")
        object.__setattr__(self, "stop", _stops(self.stop))
        object.__setattr__(self, "stop_token_ids", _ids(self.stop_token_ids))


def fresh_seed() -> int:
    """A random seed that every JSON reader keeps exact (53 bits)."""
    return int.from_bytes(os.urandom(8), "little") >> 11


def _bad(name: str, value: Any, want: str) -> RequestError:
    return RequestError(f"{name} = {value!r}", where="sampling", todo=f"Use {want}")


def _integer(name: str, value: Any, low: int, high: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or not low <= value <= high:
        raise _bad(name, value, f"an integer from {low} to {high}")


def _number(name: str, value: Any, low: float, high: float) -> None:
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else None
    if number is None or not low <= number <= high:  # NaN is in no range
        raise _bad(name, value, f"a number from {low:g} to {high:g}")


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else None
    if stops is None or not all(isinstance(s, str) and s for s in stops):
        raise _bad("stop", stop, "a text or several, none of them empty")
    return stops


def _ids(ids: Any) -> tuple[int, ...]:
    if not isinstance(ids, (list, tuple)):
        raise _bad("stop_token_ids", ids, "a list of token ids")
    for token_id in ids:
        _integer("stop_token_ids", token_id, 0, 2**31 - 1)
    return tuple(int(token_id) for token_id in ids)
