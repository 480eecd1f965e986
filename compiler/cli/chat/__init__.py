"""`octavo chat`: a conversation with an engine artifact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compiler.cli.options import (
    Acceptance,
    Digest,
    Draft,
    EnginePath,
    FrequencyPenalty,
    KvBlocks,
    KvMemory,
    MaxDraftTokens,
    MaxStepTokens,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Stop,
    Target,
    Temperature,
    Threads,
    Timeout,
    TopK,
    TopP,
    given,
)

if TYPE_CHECKING:
    from compiler.cli.chat.reader import ReadLine
    from compiler.cli.chat.session import Session
    from compiler.cli.chat.shown import Json, Text
    from runtime import Engine


def command(
    engine: EnginePath,
    system: Annotated[
        str | None, typer.Option(help="The system prompt: who answers, and how.", metavar="TEXT")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Of an answer. Default: as many as the context holds.", min=1)
    ] = None,
    temperature: Temperature = 0.7,
    top_k: TopK = 0,
    top_p: TopP = 0.95,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    seed: Seed = None,
    stop: Stop = None,
    timeout: Timeout = None,
    target: Target = None,
    threads: Threads = None,
    digest: Digest = None,
    kv_memory: KvMemory = None,
    kv_blocks: KvBlocks = None,
    max_step_tokens: MaxStepTokens = None,
    draft: Draft = None,
    max_draft_tokens: MaxDraftTokens = None,
    acceptance: Acceptance = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object for each line read, and nothing else.")
    ] = False,
) -> None:
    """Talk with a chat model. Answers are printed as they come; earlier turns are not computed again.

    octavo chat model.octavo

    octavo chat model.octavo --system "You answer in one sentence." --temperature 0.2

    octavo chat model.octavo --kv-memory 1GiB --max-new-tokens 400

    printf 'Who wrote Emma?\\nWhen?\\n' | octavo chat model.octavo --seed 1 --json

    In it, /help lists the commands: another answer, undo, settings, save and load. Where standard input is no
    terminal each line of it is a message.
    """
    import runtime
    from compiler.cli.chat.reader import line_reader
    from compiler.cli.chat.session import Session
    from compiler.cli.chat.settings import Settings
    from compiler.cli.chat.shown import Json, Text

    settings = Settings(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        timeout=timeout,
    )
    memory = given(
        digest=digest,
        kv_memory=kv_memory,
        kv_blocks=kv_blocks,
        max_step_tokens=max_step_tokens,
        draft=draft,
        max_draft_tokens=max_draft_tokens,
        acceptance=acceptance,
    )
    typed = sys.stdin.isatty() and not as_json
    shown = Json() if as_json else Text(notes=typed)
    shown.waiting(f"loading {engine.name}")
    try:
        with runtime.load(engine, target=target, threads=threads, max_requests=1, **memory) as loaded:
            _check(loaded, engine, system)
            context = f"{loaded.model.max_context:,} tokens of context"
            shown.note(f"{engine.name} on {loaded.stats().target}, {context}. /help lists commands")
            session = Session(loaded, settings, system)
            failed = converse(session, line_reader(typed), shown, typed)
    finally:
        shown.arrived()
    if failed and not typed:
        raise typer.Exit(2)


def converse(session: Session, read: ReadLine, shown: Text | Json, typed: bool) -> bool:
    """Until the end of the input, or /exit. Returns whether anything was refused. typed: by somebody who may
    interrupt a line to begin another."""
    from compiler.cli.chat.reader import read_message
    from runtime.errors import OctavoError

    failed = False
    while True:
        try:
            message = read_message(read)
        except EOFError:
            shown.note("")
            return failed
        except KeyboardInterrupt:
            shown.note("")
            if not (typed and _is_typing()):
                raise
            continue
        try:
            if message and not answer(message, session, shown):
                return failed
        except (OctavoError, OSError) as error:
            if isinstance(error, OSError) and error.filename is None:  # of a stream, and not of a file
                raise
            shown.error(message, error)
            failed = True


def answer(message: str, session: Session, shown: Text | Json) -> bool:
    """Do what one line asks; False to end."""
    from compiler.cli.chat import commands

    if not message.startswith("/") or message.startswith("//"):
        shown.waiting("...")
        turn = session.ask(message.removeprefix("/"), shown.piece)
        shown.turn(message, turn, session)
        return True
    if message == "/retry":
        shown.waiting("...")
    reply = commands.run(message, session, shown.piece)
    if reply.turn is not None:
        shown.turn(message, reply.turn, session)
    else:
        shown.reply(message, reply)
    return not reply.end


def _check(engine: Engine, path: Path, system: str | None) -> None:
    """Raises RequestError for a model that cannot chat, and for a system prompt that it does not know."""
    from compiler.cli.chat.conversation import Conversation
    from runtime.errors import RequestError

    if engine.tokenizer is None:
        todo = "Give token ids to runtime.generate, or compile from a checkpoint with its tokenizer"
        raise RequestError("it has no tokenizer: it cannot chat", where=str(path), todo=todo)
    if not engine.tokenizer.has_chat_template:
        todo = f'Continue a text with it instead: octavo generate {path} "Once upon a time"'
        raise RequestError("its model has no chat template: it cannot chat", where=str(path), todo=todo)
    engine.tokenizer.encode_chat(Conversation().with_system(system).asked("Hi").messages)


def _is_typing() -> bool:
    """Whether an interrupt left a line that was begun."""
    readline = sys.modules.get("readline")
    return readline is not None and readline.get_line_buffer() != ""
