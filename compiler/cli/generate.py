"""`octavo generate`: text from an engine artifact."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compiler.cli.errors import debug_level
from compiler.cli.loading import loading
from compiler.cli.options import (
    Acceptance,
    Digest,
    Draft,
    EnginePath,
    FrequencyPenalty,
    KvBlocks,
    KvMemory,
    LogitBias,
    MaxDraftTokens,
    MaxRequests,
    MaxStepTokens,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Stop,
    SwapMemory,
    Target,
    Temperature,
    Threads,
    Timeout,
    TopK,
    TopP,
    given,
)
from compiler.cli.streams import for_terminal

if TYPE_CHECKING:
    from runtime import Completion, Engine, Request


def command(
    engine: EnginePath,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a user's message to a chat model.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Stop after this many tokens.", min=1)] = 128,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: LogitBias = None,
    samples: Annotated[
        int,
        typer.Option(
            "-n",
            "--samples",
            help="How many continuations: each with noise of its own (give a --temperature too), or the best "
            "of --beams.",
        ),
    ] = 1,
    beams: Annotated[
        int, typer.Option(help="Above 1: beam search with so many, and the -n best texts with their scores.")
    ] = 1,
    length_penalty: Annotated[
        float, typer.Option(help="With --beams: a score is divided by the length to the power of this.")
    ] = 1.0,
    seed: Seed = None,
    stop: Stop = None,
    timeout: Timeout = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: the k best alternatives per token.")
    ] = None,
    target: Target = None,
    threads: Threads = None,
    digest: Digest = None,
    kv_memory: KvMemory = None,
    kv_blocks: KvBlocks = None,
    swap_memory: SwapMemory = None,
    max_step_tokens: MaxStepTokens = None,
    max_requests: MaxRequests = None,
    draft: Draft = None,
    max_draft_tokens: MaxDraftTokens = None,
    acceptance: Acceptance = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> None:
    """Continue a prompt, printing the text as it comes.

    octavo generate model.octavo "The capital of France is"

    octavo generate model.octavo --chat "Write a haiku." --temperature 0.8 --seed 7

    octavo generate model.octavo "Once upon a time" -n 3 --temperature 1 --timeout 20

    octavo generate model.octavo "Once upon a time" --beams 4 -n 2

    octavo generate model.octavo "Once upon a time" --repetition-penalty 1.2 --logit-bias 198=-100

    octavo generate model.octavo "2 + 2 =" --target cpu --threads 1 --kv-memory 256MiB

    octavo generate model.octavo "Fix the typos: ..." --draft lookup

    cat article.txt | octavo generate model.octavo - --max-new-tokens 64 --json
    """
    import runtime
    from runtime.service import Service

    if logprobs is not None and not as_json:
        raise runtime.RequestError("text output has no place for them", where="--logprobs", todo="Add --json")
    service = Service(timeout_s=timeout)
    text = sys.stdin.read() if prompt == "-" else prompt
    sampling = runtime.Sampling(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=tuple(_bias(text) for text in logit_bias or ()),
        seed=seed,
        stop=tuple(stop or ()),
        logprobs=logprobs,
        n=samples,
        beams=beams,
        length_penalty=length_penalty,
    )
    if samples > 1 and beams == 1 and temperature == 0:
        print("octavo: all samples are the same at --temperature 0", file=sys.stderr)
    memory = given(
        digest=digest,
        kv_memory=kv_memory,
        kv_blocks=kv_blocks,
        swap_memory=swap_memory,
        max_step_tokens=max_step_tokens,
        max_requests=max_requests,
        draft=draft,
        max_draft_tokens=max_draft_tokens,
        acceptance=acceptance,
    )
    with loading() as report:
        opened = runtime.load(engine, target=target, threads=threads, report=report, **memory)
    with opened as loaded:
        asked = [{"role": "user", "content": text}] if chat else text
        request = loaded.submit(asked, sampling, timeout_s=service.timeout_s)
        if as_json:
            found = [_as_json(completion) for completion in request.results()]
            print(json.dumps(found[0] if samples == 1 else {"samples": found}))
        elif samples == 1:
            _print_stream(request)
        else:
            _print_samples(request.results())
        late = [c.sample_index for c in request.results() if c.finish_reason == "timeout"]
        if debug_level():
            _print_log(loaded)
    if late and not as_json:
        which = "" if samples == 1 else f"{len(late)} of {samples} samples were "
        print(f"octavo: {which}cut off after {timeout} s, as --timeout says", file=sys.stderr)


def _bias(text: str) -> tuple[int, float]:
    """Of ID=BIAS. Raises RequestError."""
    import runtime

    try:
        token_id, bias = text.split("=")
        return int(token_id), float(bias)
    except ValueError as error:
        todo = "Use a token id and a number, --logit-bias 198=-100"
        raise runtime.RequestError(f"logit_bias = {text!r}", where="sampling", todo=todo) from error


def _print_log(engine: Engine) -> None:
    """What DEBUG shows: the engine's figures, and what it did to requests that they did not ask for."""
    print("\n".join(map(str, (engine.stats(), *engine.log()))), file=sys.stderr)


def _print_stream(request: Request) -> None:
    """The text as it comes."""
    for event in request:
        sys.stdout.write(for_terminal(event.text))
        sys.stdout.flush()
    sys.stdout.write("\n")


def _print_samples(completions: Sequence[Completion]) -> None:
    for completion in completions:
        score = "" if completion.score is None else f", score {completion.score:.4f}"
        print(f"--- sample {completion.sample_index} ({completion.finish_reason}{score})")
        print(for_terminal(completion.text))


def _as_json(completion: Completion) -> dict[str, Any]:
    """Every field of the completion; log-probabilities by name."""
    fields = dataclasses.asdict(completion)
    for name in ("logprobs", "prompt_logprobs"):
        entries = getattr(completion, name)
        if entries is not None:
            fields[name] = [None if entry is None else entry._asdict() for entry in entries]
    return fields
