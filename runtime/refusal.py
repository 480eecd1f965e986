"""What an engine cannot serve is refused when it is submitted, before anything runs."""

from __future__ import annotations

from runtime.errors import RequestError
from runtime.kv.cache import Cache
from runtime.manifest import Model
from runtime.sampling import Sampling


def check_servable(
    num_tokens: int, sampling: Sampling, model: Model, cache: Cache, step_tokens: int, has_tokenizer: bool
) -> None:
    """num_tokens: of the prompt. Raises RequestError."""
    context = model.max_context
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
    most = max(num_tokens, min(num_tokens + sampling.max_new_tokens, context) - 1)
    if not cache.fits(most, step_tokens):
        blocks = [group.num_blocks for group in cache.groups]
        raise RequestError(
            f"{num_tokens} prompt tokens and max_new_tokens={sampling.max_new_tokens} need a KV cache of "
            f"{most} tokens; this engine has {blocks} blocks of {cache.block} tokens",
            where="prompt",
            todo="Lower max_new_tokens, or load with more kv_memory or kv_blocks",
        )
