"""What a line that begins with a slash does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.cli.chat import conversation as files
from compiler.cli.chat.conversation import Conversation
from compiler.cli.chat.figures import count, figures, lines
from compiler.cli.chat.session import Session, Show, Turn
from compiler.cli.nearest import or_nearest
from runtime.errors import RequestError

HELP = """\
/help               this
/clear              begin a new conversation; the system prompt stays
/system [TEXT]      show the system prompt, or change it; - removes it
/retry              another answer to the last message
/undo               take the last message and its answer back
/set [NAME VALUE]   show how answers are sampled, or change it: /set temperature 0.7
/stats              speed, cached tokens and memory
/save FILE          write the messages as JSON
/load FILE          go on from such a file
/exit               end, as does Ctrl-D

A line that ends in \\ goes on in the next; \"\"\" begins and ends a message of many lines.
Ctrl-C stops an answer. A message that begins with a slash is sent with two: //"""

ALIASES = {"/?": "/help", "/quit": "/exit", "/bye": "/exit", "/reset": "/clear", "/regen": "/retry"}


@dataclass(frozen=True)
class Reply:
    """What a command says: text for people, and what it found for --json. end: the session is over."""

    text: str = ""
    found: Any = None
    turn: Turn | None = None
    end: bool = False


def run(line: str, session: Session, show: Show) -> Reply:
    """show: takes the pieces of an answer, of /retry. Raises OctavoError, OSError."""
    name, _, argument = line.partition(" ")
    name = ALIASES.get(name, name)
    if name == "/retry":
        return Reply(turn=session.retry(show))
    if name not in COMMANDS:
        raise RequestError(f"there is no {name}", todo=or_nearest(name, [*COMMANDS, "/retry"]))
    return COMMANDS[name](session, argument.strip())


def _help(session: Session, argument: str) -> Reply:
    return Reply(HELP)


def _clear(session: Session, argument: str) -> Reply:
    session.conversation = session.conversation.cleared()
    return Reply("a new conversation")


def _system(session: Session, argument: str) -> Reply:
    if argument:
        session.conversation = session.conversation.with_system(None if argument == "-" else argument)
    system = session.conversation.system
    return Reply("no system prompt" if system is None else f"system prompt: {system}", system)


def _undo(session: Session, argument: str) -> Reply:
    session.conversation = session.conversation.undone()
    return _state(session.conversation)


def _set(session: Session, argument: str) -> Reply:
    if argument:
        name, _, value = argument.partition(" ")
        session.settings = session.settings.changed(name, value)
    return Reply(session.settings.text(), session.settings)


def _stats(session: Session, argument: str) -> Reply:
    found = figures(session)
    return Reply(lines(found), found)


def _save(session: Session, argument: str) -> Reply:
    files.write(session.conversation, _path(argument, "/save"))
    return Reply(f"saved to {argument}")


def _load(session: Session, argument: str) -> Reply:
    session.conversation = files.read(_path(argument, "/load"))
    return _state(session.conversation)


def _exit(session: Session, argument: str) -> Reply:
    return Reply(end=True)


def _path(argument: str, command: str) -> Path:
    if not argument:
        raise RequestError("no file is named", where=command, todo=f"Say which: {command} chat.json")
    return Path(argument).expanduser()


def _state(conversation: Conversation) -> Reply:
    """How far the conversation is, with the start of its last message."""
    if not conversation.messages:
        return Reply("the conversation is empty")
    last = conversation.messages[-1]
    words = " ".join(last["content"].split())
    start = words if len(words) <= 60 else words[:57] + "..."
    return Reply(
        f"{count(conversation.num_turns, 'turn')}, the last message is the {last['role']}'s: {start}"
    )


COMMANDS: dict[str, Callable[[Session, str], Reply]] = {
    "/help": _help,
    "/clear": _clear,
    "/system": _system,
    "/undo": _undo,
    "/set": _set,
    "/stats": _stats,
    "/save": _save,
    "/load": _load,
    "/exit": _exit,
}
