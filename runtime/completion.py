"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "cancelled", "timeout"]


class TokenLogprob(NamedTuple):
    """One token's log-probability under the unscaled logits, and the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds since submission: first computed on, first token out, finished (None: did not happen)."""

    started_s: float | None
    first_token_s: float | None
    total_s: float


@dataclass(frozen=True, slots=True)
class Drafts:
    """What came of drafts: how many were verified, how many of them were right.

    by_position: (drafted, accepted) at each place of a draft; one is accepted where all before it were.
    speedup: what its tokens would have taken without drafts, over what they took, as it is estimated; None
    where nothing was measured.
    """

    drafted: int
    accepted: int
    by_position: tuple[tuple[int, int], ...]
    speedup: float | None


@dataclass(frozen=True, slots=True)
class Completion:
    """One sample of one prompt.

    text: without special tokens, stop texts and what follows them ("" if the artifact has no tokenizer).
    token_ids: all that were sampled, an end token included. finish_reason: "stop" (an end token or a stop
    text), "length" (max_new_tokens or the context), "cancelled", "timeout". prompt_logprobs: one entry per
    prompt token, the first None. cached_tokens: prompt tokens that were not computed, thanks to a prefix hit
    or a fork. draft: None where no draft was verified.
    score: of beam search, the sum of the tokens' log-probabilities / their number**length_penalty.
    """

    prompt_index: int
    sample_index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[TokenLogprob] | None
    prompt_logprobs: list[TokenLogprob | None] | None
    prompt_token_ids: list[int]
    cached_tokens: int
    seed: int
    timings: Timings
    score: float | None = None
    draft: Drafts | None = None


class Event(NamedTuple):
    """One step of one sample's output.

    text: what became certain with this token; the texts of all events of a sample make up its completion's
    text. The last event has a finish_reason; its token_id is None if no token came with it. A beam search's
    samples have no event but the last.
    """

    prompt_index: int
    sample_index: int
    token_id: int | None
    text: str
    logprob: TokenLogprob | None
    finish_reason: FinishReason | None
