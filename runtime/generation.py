"""Text from prompts, in one call: the shorthand over Engine.submit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from typing import Any, Literal, cast

import numpy as np

from runtime.completion import Completion, Event
from runtime.engine import Engine
from runtime.errors import RequestError, shown
from runtime.loading import load
from runtime.prompt import Prompt, as_prompts
from runtime.request import Request
from runtime.sampling import Sampling
from runtime.service import Service
from runtime.speculation.choose import Acceptance

Job = tuple[np.ndarray, Sampling, int, Service]  # token ids, and how; the int is the prompt's index


def generate(
    engine: Engine | str | os.PathLike[str],
    prompts: Prompt | Seq[Prompt],
    sampling: Sampling | Seq[Sampling] | None = None,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int | Seq[int] | None = None,
    stop: str | Seq[str] | None = None,
    stop_token_ids: Seq[int] | None = None,
    ignore_eos: bool = False,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    n: int = 1,
    beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    draft_tokens: int | None = None,
    priority: int = 0,
    timeout_s: float | None = None,
    cache_salt: str = "",
    stream: bool = False,
    draft: str | os.PathLike[str] | None = None,
    acceptance: Acceptance | None = None,
    max_draft_tokens: int | None = None,
) -> list[Completion] | Iterator[Event]:
    """Complete one prompt or many.

    engine: a loaded engine, or the path of an artifact, which is then loaded for this call. prompts: a text,
    a list of token ids, chat messages (a list of dicts), or a list of these. sampling: one for all prompts or
    one per prompt; the keywords are shorthand for one, see Sampling. seed: one, or one per prompt. priority,
    timeout_s, cache_salt: how they are served, see Service. draft, acceptance, max_draft_tokens: see load; of
    an engine that is loaded here. Returns
    the completions in the prompts' order, the n samples of a prompt in sequence. stream=True returns an
    iterator of events instead, as they come from all prompts; leaving it early cancels what is not finished.
    Raises RequestError before anything runs if a prompt or a parameter cannot be served.
    """
    if not isinstance(stream, bool):
        raise RequestError(f"stream = {shown(stream)}", where="generate", todo="Use True or False")
    many = as_prompts(prompts)
    shorthand = Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        stop=() if stop is None else cast(Any, stop),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        stop_token_ids=() if stop_token_ids is None else cast(Any, stop_token_ids),
        prompt_logprobs=prompt_logprobs,
        n=n,
        beams=beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=() if logit_bias is None else logit_bias,
        draft_tokens=draft_tokens,
    )
    if sampling is not None and shorthand != Sampling():
        todo = "Put all of it in the Sampling"
        raise RequestError("sampling and keywords are both given", where="generate", todo=todo)
    samplings = _per_prompt(shorthand if sampling is None else sampling, seed, len(many))
    service = Service(priority, timeout_s, cache_salt)
    if isinstance(engine, Engine):
        _check_unset(draft=draft, acceptance=acceptance, max_draft_tokens=max_draft_tokens)
        jobs = _prepare(engine, many, samplings, service)
        return _stream(engine, jobs) if stream else _complete(engine, jobs)
    with ExitStack() as stack:
        loaded = load(engine, draft=draft, acceptance=acceptance, max_draft_tokens=max_draft_tokens)
        owned = stack.enter_context(loaded)
        jobs = _prepare(owned, many, samplings, service)
        if stream:  # the stream closes the engine
            return _stream(owned, jobs, stack.pop_all())
        return _complete(owned, jobs)


def _check_unset(**given: Any) -> None:
    """Raises RequestError where options of load were given for an engine that is loaded."""
    for name, value in given.items():
        if value is not None:
            what = f"{name} = {shown(value)}, but the engine is loaded already"
            raise RequestError(what, where="generate", todo=f"Give {name} to runtime.load")


def _per_prompt(
    sampling: Sampling | Seq[Sampling], seed: int | Seq[int] | None, count: int
) -> list[Sampling]:
    """One sampling per prompt; a seed given beside it counts."""
    samplings = list(sampling) if isinstance(sampling, Seq) else [sampling] * count
    seeds = list(seed) if isinstance(seed, Seq | np.ndarray) and np.ndim(seed) else [seed] * count
    for given in samplings:
        if not isinstance(given, Sampling):
            todo = "Use runtime.Sampling, one or one per prompt"
            raise RequestError(f"sampling = {shown(given)}", where="generate", todo=todo)
    if len(samplings) != count or len(seeds) != count:
        found = f"{len(samplings)} samplings and {len(seeds)} seeds for {count} prompts"
        raise RequestError(found, where="generate", todo="Give one for all, or one per prompt")
    return [s if x is None else replace(s, seed=x) for s, x in zip(samplings, seeds, strict=True)]


def _prepare(engine: Engine, prompts: Seq[Any], samplings: Seq[Sampling], service: Service) -> list[Job]:
    """All prompts, ready to be queued, or the first refusal, with the prompt's index."""
    jobs: list[Job] = []
    for index, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        try:
            jobs.append((engine.prepare(prompt, sampling, service), sampling, index, service))
        except RequestError as error:
            where = f"prompt {index}" + (f", {error.where}" if error.where != "prompt" else "")
            raise RequestError(error.what, where=where, todo=error.todo) from error
    return jobs


def _complete(engine: Engine, jobs: Seq[Job]) -> list[Completion]:
    requests: list[Request] = []
    try:
        for job in jobs:
            requests.append(engine.enqueue(*job))
        return [completion for request in requests for completion in request.results()]
    finally:
        _cancel(requests)


def _stream(engine: Engine, jobs: Seq[Job], owned: ExitStack | None = None) -> Iterator[Event]:
    """Events of all prompts in the order in which they happen. owned: closed at the end."""
    requests: list[Request] = []
    changed: SimpleQueue[Request] = SimpleQueue()
    try:
        for job in jobs:
            request = engine.enqueue(*job)
            requests.append(request)
            request.watch(partial(changed.put, request))
        seen = dict.fromkeys(requests, 0)
        while seen:
            request = changed.get()
            if request not in seen:
                continue
            events, done = request.since(seen[request])
            yield from events
            seen[request] += len(events)
            if done:
                request.check()
                del seen[request]
    finally:
        _cancel(requests)
        if owned is not None:
            owned.close()


def _cancel(requests: Seq[Request]) -> None:
    for request in requests:
        if not request.done:
            request.cancel()
