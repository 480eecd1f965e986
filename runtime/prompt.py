"""Prompts: a text, token ids, or chat messages; one or many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from runtime.errors import RequestError, shown
from runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
_KINDS = "Give a text, a list of token ids, or a list of messages"


def as_prompts(prompts: Any) -> list[Any]:
    """A list of prompts, from one or many. Raises RequestError."""
    if isinstance(prompts, str):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(f"{shown(prompts)} is no prompt", where="prompts", todo=_KINDS + ", or several")
    if len(prompts) == 0:
        raise RequestError("there is none", where="prompts", todo="Give at least one, of at least one token")
    return [prompts] if isinstance(prompts[0], Mapping | int | np.integer) else list(prompts)


def encode(prompt: Any, tokenizer: Tokenizer | None, vocab_size: int, *, answer: bool = True) -> np.ndarray:
    """Token ids of one prompt, i32. answer: after messages the assistant's follows. Raises RequestError."""
    if isinstance(prompt, str) or (_is_list(prompt) and len(prompt) > 0 and isinstance(prompt[0], Mapping)):
        if tokenizer is None:
            raise RequestError("this artifact has no tokenizer", where="prompt", todo="Give token ids")
        text = isinstance(prompt, str)
        ids = tokenizer.encode(prompt) if text else tokenizer.encode_chat(prompt, answer=answer)
    elif _is_list(prompt):
        ids = list(prompt)
    else:
        raise RequestError(f"{shown(prompt)} is no prompt", where="prompt", todo=_KINDS)
    for at, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, int | np.integer) or not 0 <= token < vocab_size:
            todo = f"Use integers from 0 to {vocab_size - 1}, a text, or messages"
            if isinstance(token, str):
                todo = "Several texts are several prompts: submit each, or give them to runtime.generate"
            raise RequestError(f"token {at} is {shown(token)}", where="prompt", todo=todo)
    return np.array(ids, np.int32)


def encode_rest(rest: Any, tokenizer: Tokenizer | None, vocab_size: int) -> np.ndarray:
    """Token ids, i32, of a text (or ids) that goes on where another ends: no BOS or the like before it.

    Raises RequestError, also for messages: a template writes a conversation from its start.
    """
    if not isinstance(rest, str) and _is_list(rest) and len(rest) > 0 and isinstance(rest[0], Mapping):
        todo = "Give the text of the next turn or its token ids, or submit all messages"
        raise RequestError("messages begin a conversation", where="append", todo=todo)
    try:
        if isinstance(rest, str) and tokenizer is not None:
            rest = tokenizer.encode(rest, add_special_tokens=False)
        return encode(rest, tokenizer, vocab_size)
    except RequestError as error:
        raise RequestError(error.what, where="append", todo=error.todo) from None


def _is_list(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)
