"""Penalties and biases: how parameters change a row of logits on its way to the choice of a token.

In this order, each rounded to f32:
- the repetition penalty of every token of prompt and output (Keskar et al., arXiv 1909.05858): a positive
  logit is divided by it, a negative one multiplied;
- the frequency and presence penalties of every token of the output (OpenAI's API reference): l - count *
  frequency - presence;
- the bias of a token.

What comes out depends on the row, the parameters and the tokens before it alone, so that the row after a
draft counts the draft. Log-probabilities stay those of the model's own rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np

from runtime.executor import Forward, Logits, SampleArgs, Sampled
from runtime.sampling import Sampling

_LARGEST = float(np.finfo(np.float32).max)


class Adjustment(NamedTuple):
    """Of one row. tokens: known before the position that the row is sampled for, the prompt's first."""

    row: int
    sampling: Sampling
    tokens: np.ndarray  # i32 [position]
    prompt_tokens: int


def adjust(logits: np.ndarray, sampling: Sampling, tokens: np.ndarray, prompt_tokens: int) -> np.ndarray:
    """A row f32 [V] as it is sampled from, f32 [V], a copy. See Adjustment.

    What was finite stays so: no sum or product is beyond the largest float.
    """
    out = np.array(logits, np.float32)
    if sampling.repetition_penalty != 1.0:
        at = np.flatnonzero(np.bincount(tokens, minlength=len(out)))
        found, penalty = out[at], np.float32(sampling.repetition_penalty)
        with np.errstate(over="ignore"):
            _put(out, at, np.where(found < 0, found * penalty, found / penalty))
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = np.bincount(tokens[prompt_tokens:], minlength=len(out))
        at = np.flatnonzero(counts)
        _put(out, at, out[at] - counts[at] * sampling.frequency_penalty - sampling.presence_penalty)
    if sampling.biases:
        ids, biases = zip(*sampling.biases, strict=True)
        at = np.array(ids)
        _put(out, at, out[at] + np.array(biases, np.float64))
    return out


def _put(out: np.ndarray, at: np.ndarray, values: np.ndarray) -> None:
    """Write values into out[at], but where that is NaN or infinite."""
    out[at] = np.where(np.isfinite(out[at]), np.clip(values, -_LARGEST, _LARGEST), out[at])


def sample_adjusted(
    executor: Forward, logits: Logits, args: SampleArgs, adjustments: Seq[Adjustment]
) -> Sampled:
    """As executor.sample, but for some rows, which are as they were when it returns or raises EngineError."""
    at = np.array([a.row for a in adjustments])
    own = executor.download(logits[at])
    rows = [adjust(row, *a[1:]) for row, a in zip(own, adjustments, strict=True)]
    executor.overwrite(logits, at, np.stack(rows))
    try:
        sampled = executor.sample(logits, args)
    finally:
        executor.overwrite(logits, at, own)
    return _as_of_the_model(executor, logits, at, sampled, args.num_top) if args.logprobs else sampled


def _as_of_the_model(
    executor: Forward, logits: Logits, at: np.ndarray, sampled: Sampled, num_top: int
) -> Sampled:
    """With log-probabilities under the rows that are there now."""
    ids, logprobs, top_ids, top_logprobs = (
        array.copy() for array in (sampled.ids, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)
    )
    rows = logits[at]
    logprobs[at] = executor.logprobs(rows, ids[at])
    if num_top:
        top = executor.sample(rows, SampleArgs.greedy(len(at), num_top))
        top_ids[at], top_logprobs[at] = top.top_ids, top.top_logprobs
    return Sampled(ids, logprobs, top_ids, top_logprobs)
