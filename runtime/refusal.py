"""What an engine cannot serve is refused when it is submitted, before anything runs."""

from __future__ import annotations

import numpy as np

from runtime.errors import RequestError
from runtime.kv.cache import Cache
from runtime.manifest import Model
from runtime.sampling import Sampling
from runtime.service import Service


def check_servable(
    ids: np.ndarray,  # [S], the prompt
    sampling: Sampling,
    service: Service,
    model: Model,
    cache: Cache,
    step_tokens: int,
    has_tokenizer: bool,
) -> None:
    """Raises RequestError."""
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
    for name in ("logprobs", "prompt_logprobs"):
        if (getattr(sampling, name) or 0) > model.vocab_size:
            raise RequestError(
                f"{name} = {getattr(sampling, name)}",
                where="sampling",
                todo=f"Use at most {model.vocab_size}, the vocabulary",
            )
    check_room(ids, sampling, service, context, cache, step_tokens)


def check_room(
    ids: np.ndarray, sampling: Sampling, service: Service, context: int, cache: Cache, step_tokens: int
) -> None:
    """Raises RequestError where a request cannot run even when it is alone with the pinned prefixes."""
    num_tokens = len(ids)
    most = max(num_tokens, min(num_tokens + sampling.max_new_tokens, context) - 1)
    shared = 0 if sampling.prompt_logprobs is not None else cache.pins.shared(ids, service.salt)
    if not cache.fits(most, step_tokens, shared):
        blocks = [group.num_blocks for group in cache.groups]
        raise RequestError(
            f"{num_tokens} prompt tokens and max_new_tokens={sampling.max_new_tokens} need a KV cache of "
            f"{most} tokens; this engine has {blocks} blocks of {cache.block} tokens"
            + (", some of them pinned" if cache.pins else ""),
            where="prompt",
            todo="Lower max_new_tokens, or load with more kv_memory or kv_blocks"
            + (", or release a pinned prefix" if cache.pins else ""),
        )
