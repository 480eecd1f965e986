"""How tokens are chosen and when to stop: the parameters of one request."""

from __future__ import annotations

import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, cast

from runtime.errors import RequestError, shown

MAX_LOGPROBS = 1000
MIN_TEMPERATURE = 1e-5  # below, logits / temperature leaves what 32-bit floats resolve
MAX_SAMPLES = 1024
MAX_BEAMS = 1000
MAX_BIAS = 100.0
MAX_DRAFT_TOKENS = 64
_UNSET = {  # what beams cannot have
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "stop": (),
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
}


@dataclass(frozen=True)
class Sampling:
    """Parameters of one request; checked when made (RequestError).

    max_new_tokens: 0 scores the prompt only. temperature: 0 is greedy. top_k: 0 keeps all. top_p: 1 keeps
    all. min_p: keeps tokens at least this fraction as likely as the likeliest. seed: 64 bits; None draws one,
    which the completion reports. stop: texts that end the output and are left out of it. stop_token_ids: like
    the model's end tokens, which ignore_eos disregards. logprobs, prompt_logprobs: None, or how many
    alternatives to report per token. n: samples per prompt.

    beams: above 1, beam search, of whose texts the n best are the samples, best first. It samples nothing and
    knows no stop texts. length_penalty: a score is divided by the number of tokens to the power of this, so
    that higher ones favour longer texts. early_stopping: False, True or "never", as transformers' generate().

    repetition_penalty: of all tokens before; above 1 they are less likely. presence_penalty,
    frequency_penalty: taken from a token's logit if the output has it, and for each time that it does.
    logit_bias: what is added to tokens' logits, by id; kept as pairs in the order of ids. See
    runtime.penalties; log-probabilities are the model's own.

    draft_tokens: how many tokens a step drafts where the engine has a drafter; None: as many as pay. No token
    depends on it.
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
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | tuple[tuple[int, float], ...] = ()
    draft_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, value in self._checked().items():
            object.__setattr__(self, name, value)
        self._check_beams()

    @property
    def num_sequences(self) -> int:
        """How many are computed side by side."""
        return max(self.n, self.beams)

    @property
    def adjusts(self) -> bool:
        """Whether rows are not sampled as the model computes them."""
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return penalties != (1.0, 0.0, 0.0) or bool(self.logit_bias)

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias as it is kept."""
        return cast(tuple[tuple[int, float], ...], self.logit_bias)

    def _checked(self) -> dict[str, Any]:
        """Every field as a plain Python value: numpy's own integers would wrap around in sums."""
        if not isinstance(self.ignore_eos, bool):
            raise _bad("ignore_eos", self.ignore_eos, "True or False")
        return {
            "max_new_tokens": _integer("max_new_tokens", self.max_new_tokens, 0, 2**31 - 1),
            "temperature": _temperature(self.temperature),
            "top_k": _integer("top_k", self.top_k, 0, 2**31 - 1),
            "top_p": _number("top_p", self.top_p, 1e-9, 1.0),
            "min_p": _number("min_p", self.min_p, 0.0, 1.0),
            "seed": _optional("seed", self.seed, 2**64 - 1),
            "stop": _stops(self.stop),
            "stop_token_ids": _ids(self.stop_token_ids),
            "logprobs": _optional("logprobs", self.logprobs, MAX_LOGPROBS),
            "prompt_logprobs": _optional("prompt_logprobs", self.prompt_logprobs, MAX_LOGPROBS),
            "n": _integer("n", self.n, 1, MAX_SAMPLES),
            "beams": _integer("beams", self.beams, 1, MAX_BEAMS),
            "length_penalty": _number("length_penalty", self.length_penalty, -10.0, 10.0),
            "early_stopping": _early_stopping(self.early_stopping),
            "repetition_penalty": _number("repetition_penalty", self.repetition_penalty, 0.01, 100.0),
            "presence_penalty": _number("presence_penalty", self.presence_penalty, -2.0, 2.0),
            "frequency_penalty": _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0),
            "logit_bias": _id_biases(self.logit_bias),
            "draft_tokens": _optional("draft_tokens", self.draft_tokens, MAX_DRAFT_TOKENS),
        }

    def _check_beams(self) -> None:
        """Refuse what does not go together."""
        if self.beams == 1:
            for name, unset in (("length_penalty", 1.0), ("early_stopping", False)):
                if getattr(self, name) != unset:
                    raise _bad(name, getattr(self, name), "it with beams above 1 only")
            return
        if self.n > self.beams:
            raise _bad("n", self.n, f"at most {self.beams}, the beams")
        for name, unset in _UNSET.items():
            if getattr(self, name) != unset:
                raise _bad(name, getattr(self, name), f"{name}={unset!r} with beams, or beams=1")


def fresh_seed() -> int:
    """A random seed that every JSON reader keeps exact (53 bits)."""
    return int.from_bytes(os.urandom(8), "little") >> 11


def _bad(name: str, value: Any, want: str) -> RequestError:
    return RequestError(f"{name} = {shown(value)}", where="sampling", todo=f"Use {want}")


def _integer(name: str, value: Any, low: int, high: int) -> int:
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise _bad(name, value, f"an integer from {low} to {high}")
    return number


def _optional(name: str, value: Any, high: int) -> int | None:
    return None if value is None else _integer(name, value, 0, high)


def _number(name: str, value: Any, low: float, high: float) -> float:
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else None
    if number is None or not low <= number <= high:  # NaN is in no range
        raise _bad(name, value, f"a number from {low:g} to {high:g}")
    return float(number)


def _temperature(value: Any) -> float:
    number = _number("temperature", value, 0.0, 1e6)
    if 0 < number < MIN_TEMPERATURE:
        raise _bad("temperature", value, f"0, or a number from {MIN_TEMPERATURE:g} to 1e+06")
    return number


def _early_stopping(value: Any) -> bool | str:
    if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
        raise _bad("early_stopping", value, 'True, False or "never"')
    return value


def _stops(stop: Any) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Sequence) else None
    if stops is None or not all(isinstance(s, str) and s for s in stops):
        raise _bad("stop", stop, "a text or several, none of them empty")
    if len(set(stops)) < len(stops):
        raise _bad("stop", stop, "each text once")
    return stops


def _ids(ids: Any) -> tuple[int, ...]:
    try:
        found = None if isinstance(ids, str | bytes | Mapping) else tuple(ids)
    except TypeError:
        found = None
    if found is None:
        raise _bad("stop_token_ids", ids, "a list of token ids")
    return tuple(_integer("stop_token_ids", token_id, 0, 2**31 - 1) for token_id in found)


def _id_biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Pairs of token id and bias, by id."""
    try:
        pairs = list(given.items()) if isinstance(given, Mapping) else [(a, b) for a, b in given]
    except (TypeError, ValueError):
        pairs = None
    if pairs is None or isinstance(given, str | bytes):
        raise _bad("logit_bias", given, "a dict from token ids to numbers")
    found = {
        _integer("logit_bias", token_id, 0, 2**31 - 1): _number("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        for token_id, bias in pairs
    }
    if len(found) < len(pairs):
        raise _bad("logit_bias", given, "each token id once")
    return tuple(sorted(found.items()))
