"""A conversation: the messages so far, and what its turns and files do to them."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.files import is_file
from runtime.errors import RequestError

Message = Mapping[str, Any]  # {"role": ..., "content": ...}, both texts
MOST_BYTES = 64 << 20  # of a file that is read as a conversation


@dataclass(frozen=True)
class Conversation:
    """messages: a system message or none, then the user's and the assistant's."""

    messages: tuple[Message, ...] = ()

    @property
    def system(self) -> str | None:
        first = self.messages[0] if self.messages else {}
        return first["content"] if first.get("role") == "system" else None

    @property
    def num_turns(self) -> int:
        return sum(message["role"] == "user" for message in self.messages)

    def with_system(self, text: str | None) -> Conversation:
        """With another system message in its place, or none."""
        system = () if text is None else (_message("system", text),)
        return Conversation(system + self.messages[self.system is not None :])

    def asked(self, text: str) -> Conversation:
        return Conversation((*self.messages, _message("user", text)))

    def answered(self, text: str) -> Conversation:
        return Conversation((*self.messages, _message("assistant", text)))

    def cleared(self) -> Conversation:
        """The system message alone."""
        return Conversation(self.messages[: self.system is not None])

    def undone(self) -> Conversation:
        """Up to the last of the user's messages, without it."""
        return Conversation(self.messages[: self._last_question()])

    def unanswered(self) -> Conversation:
        """Up to the last of the user's messages, with it."""
        return Conversation(self.messages[: self._last_question() + 1])

    def text(self) -> str:
        """As a file holds it: a JSON list of messages, as runtime.generate takes them for a prompt."""
        return json.dumps(self.messages, ensure_ascii=False, indent=1) + "\n"

    def _last_question(self) -> int:
        roles = [message["role"] for message in self.messages]
        if "user" not in roles:
            raise RequestError("no message has been sent yet", where="chat", todo="Send one first")
        return len(roles) - 1 - roles[::-1].index("user")


def read(path: Path) -> Conversation:
    """A saved conversation. Raises RequestError where the file is none, and OSError."""
    if path.exists() and not path.is_dir() and not is_file(path):  # a pipe may have no end
        raise RequestError("not a file", where=str(path), todo="Give one that /save wrote")
    with path.open("rb") as file:
        content = file.read(MOST_BYTES + 1)
    try:
        if len(content) > MOST_BYTES:
            raise ValueError(f"more than {MOST_BYTES >> 20} MiB")
        return Conversation(_checked(json.loads(content)))
    except (ValueError, RecursionError) as error:
        todo = 'Give a file that /save wrote: a JSON list of {"role": ..., "content": ...}'
        raise RequestError(f"not a conversation ({error})", where=str(path), todo=todo) from error


def write(conversation: Conversation, path: Path) -> None:
    """Whole or not at all, and never in the place of another kind of file. Raises RequestError, OSError."""
    if path.exists():
        try:
            read(path)
        except RequestError as error:
            raise RequestError(
                "there is a file that is no conversation", where=str(path), todo="Give another name"
            ) from error
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(conversation.text(), encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _checked(messages: Any) -> tuple[Message, ...]:
    if not isinstance(messages, list):
        raise ValueError("no list of messages")
    for i, message in enumerate(messages):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"message {i} lacks a role or a content that is text")
        if message["role"] == "system" and i > 0:
            raise ValueError(f"message {i} is a system message, which comes first")
    return tuple(messages)
