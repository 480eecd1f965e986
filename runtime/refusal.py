"""What an engine cannot serve is refused when it is submitted, before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np

from runtime.errors import RequestError, shown
from runtime.kv.cache import Cache
from runtime.kv.group import Group
from runtime.kv.pins import Pins
from runtime.manifest import Model
from runtime.request import Request
from runtime.sampling import MAX_BEAMS, Sampling
from runtime.service import Service


def check_request(value: Any, name: str = "request") -> Request:
    """Raises RequestError where it is none."""
    if not isinstance(value, Request):
        raise RequestError(
            f"{name} = {shown(value)}", where="engine", todo="Give what Engine.submit returned"
        )
    return value


def check_servable(ids: np.ndarray, sampling: Sampling, model: Model, has_tokenizer: bool) -> None:
    """Whether the model can take the prompt, ids: [S], and give what is asked for. Raises RequestError."""
    if not isinstance(sampling, Sampling):
        what = f"sampling = {shown(sampling)}"
        raise RequestError(what, where="request", todo="Use runtime.Sampling")
    context, num_tokens = model.max_context, len(ids)
    if num_tokens == 0:
        raise RequestError(
            "it has no tokens", where="prompt", todo="Give at least one token, a BOS for example"
        )
    if num_tokens > context:
        raise RequestError(
            f"{num_tokens} tokens; the context holds {context}",
            where="prompt",
            todo="Shorten it, or compile with a larger --max-context",
        )
    if sampling.stop and not has_tokenizer:
        raise RequestError(
            "stop texts need a tokenizer, which this artifact lacks",
            where="sampling",
            todo="Use stop_token_ids",
        )
    if sampling.biases and sampling.biases[-1][0] >= model.vocab_size:
        raise RequestError(
            f"logit_bias of token {sampling.biases[-1][0]}",
            where="sampling",
            todo=f"Use token ids below {model.vocab_size}, the vocabulary",
        )
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(sampling, name) or 0) > model.vocab_size:
            raise RequestError(
                f"{name} = {getattr(sampling, name)}",
                where="sampling",
                todo=f"Use at most {model.vocab_size}, the vocabulary",
            )


def check_beams(sampling: Sampling, num_ends: int, vocab_size: int, max_requests: int) -> None:
    """Raises RequestError where a step has too few places for the beams, or a row too few tokens."""
    beams = sampling.beams
    if beams == 1:
        return
    if beams > max_requests:
        raise RequestError(
            f"{beams} beams; this engine runs {max_requests} sequences at once",
            where="sampling",
            todo="Use fewer beams, or load with more max_requests",
        )
    if beams + num_ends > min(MAX_BEAMS, vocab_size):
        raise RequestError(
            f"{beams} beams and {num_ends} end tokens, of a vocabulary of {vocab_size}",
            where="sampling",
            todo=f"Use at most {min(MAX_BEAMS, vocab_size)} of both together",
        )


def check_room(
    ids: np.ndarray,
    sampling: Sampling,
    service: Service,
    context: int,
    cache: Cache,
    step_tokens: int,
    pins: Pins,
) -> None:
    """Raises RequestError where a request cannot run even when it is alone with the pinned prefixes."""
    num_tokens = len(ids)
    most = max(num_tokens, min(num_tokens + sampling.max_new_tokens, context) - 1)
    shared = 0 if sampling.prompt_logprobs is not None else pins.shared(ids, service.salt)
    fits = _fits(most, cache, step_tokens, pins, shared)
    if sampling.beams > 1 and most > num_tokens:
        fits = _fit_beams(num_tokens, most, sampling.beams, cache, step_tokens, pins, shared)
    if not fits:
        blocks = " and ".join(str(group.num_blocks) for group in cache.groups)
        beams = f" for each of {sampling.beams} beams, and a block to go" if sampling.beams > 1 else ""
        raise RequestError(
            f"{num_tokens} prompt tokens and max_new_tokens={sampling.max_new_tokens} need a KV cache of "
            f"{most} tokens{beams}; this engine has {blocks} blocks of {cache.block} tokens"
            + (", some of them pinned" if pins else ""),
            where="prompt",
            todo="Lower max_new_tokens, or load with more kv_memory or kv_blocks"
            + (", or release a pinned prefix" if pins else ""),
        )


def _fits(tokens: int, cache: Cache, step_tokens: int, pins: Pins, shared: int) -> bool:
    """Whether a request of `tokens` tokens can run when it is alone with the pinned prefixes, of which it
    shares so many blocks in full groups."""
    return all(
        group.most_blocks(tokens, step_tokens, cache.block)
        - (shared if group.is_full else 0)
        + pins.blocks(group)
        <= group.num_blocks
        for group in cache.groups
    )


def _fit_beams(
    num_tokens: int, most: int, beams: int, cache: Cache, step_tokens: int, pins: Pins, shared: int
) -> bool:
    """Whether a prompt's beams can run side by side, of `most` tokens each, with a block to go for each.

    They share the prompt's full blocks, also when they are computed again, unless a window or a state has
    given blocks back that a hit would need.
    """
    share = cache.prefix_cache and all(group.is_full or group.tail for group in cache.groups)
    common = num_tokens // cache.block if share else 0

    def need(group: Group) -> int:
        if group.tail:
            return beams + 1
        each = group.most_blocks(most, step_tokens, cache.block) - common + 1
        return common + beams * each - (shared if group.is_full else 0)

    return all(need(group) <= group.num_blocks - pins.blocks(group) for group in cache.groups)
