"""How answers are sampled, and how /set changes it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from compiler.cli.nearest import or_nearest
from runtime.errors import RequestError, shorten
from runtime.sampling import Sampling
from runtime.service import Service

NAMES = (
    "max_new_tokens", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "timeout",
)  # fmt: skip
_OPTIONAL = ("max_new_tokens", "seed", "stop", "timeout")  # "none" unsets them
_WHOLE = ("max_new_tokens", "top_k", "seed")


@dataclass(frozen=True)
class Settings:
    """Checked when made (RequestError). max_new_tokens: None for what the context holds. timeout: seconds of
    one answer."""

    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    timeout: float | None = None

    def __post_init__(self) -> None:
        self.sampling(1 if self.max_new_tokens is None else self.max_new_tokens)
        Service(timeout_s=self.timeout)
        if self.max_new_tokens == 0:
            raise RequestError("max_new_tokens = 0", where="sampling", todo="Use 1 or more, or none")

    def sampling(self, max_new_tokens: int) -> Sampling:
        fields = {name: getattr(self, name) for name in NAMES if name not in ("max_new_tokens", "timeout")}
        return Sampling(max_new_tokens=max_new_tokens, **fields)

    def changed(self, name: str, text: str) -> Settings:
        """With one of them as it was typed. Raises RequestError."""
        name = name.replace("-", "_")
        if name not in NAMES:
            raise RequestError(f"there is no {name!r}", where="/set", todo=or_nearest(name, NAMES))
        return replace(self, **{name: _value(name, text.strip())})

    def text(self) -> str:
        return "\n".join(f"{name:19} {_shown(getattr(self, name))}" for name in NAMES)


def _value(name: str, text: str) -> Any:
    if text.lower() == "none" and name in _OPTIONAL:
        return () if name == "stop" else None
    try:
        if name == "stop":
            return (json.loads(text) if text[:1] == '"' else text,)
        return int(text) if name in _WHOLE else float(text)
    except ValueError as error:
        kind = "a text" if name == "stop" else "a whole number" if name in _WHOLE else "a number"
        todo = f"Use {kind}" + (", or none" if name in _OPTIONAL else "")
        raise RequestError(f"{name} = {shorten(repr(text))}", where="/set", todo=todo) from error


def _shown(value: Any) -> str:
    if value is None or value == ():
        return "none"
    return " ".join(map(json.dumps, value)) if isinstance(value, tuple) else f"{value}"
