"""Messages from lines: a message is a line, unless it says that it goes on."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from compiler.cli.chat.commands import ALIASES, COMMANDS

PROMPT, MORE = ">>> ", "... "
QUOTES = '"""'
KEPT_LINES = 1000

ReadLine = Callable[[str], str]  # takes the prompt; raises EOFError


def read_message(read: ReadLine) -> str:
    """A line that ends in a backslash goes on in the next, and three quotes begin and end many lines.

    Raises EOFError at the end; a message that it cuts off is given as it is.
    """
    text = read(PROMPT)
    if text.lstrip().startswith(QUOTES):
        return _quoted(text.lstrip().removeprefix(QUOTES), read)
    try:
        while text.endswith("\\"):
            text = text[:-1] + "\n"
            text += read(MORE)
    except EOFError:
        pass
    return text.strip()


def _quoted(text: str, read: ReadLine) -> str:
    """text: what follows the first quotes in their line."""
    try:
        while not text.rstrip().endswith(QUOTES):
            text += "\n" + read(MORE)
    except EOFError:
        pass
    return text.rstrip().removesuffix(QUOTES).strip("\n")


def line_reader(prompts: bool) -> ReadLine:
    """Lines of standard input. prompts: somebody types them. They can be edited, and are remembered, where
    standard output is a terminal too."""
    reconfigure = getattr(sys.stdin, "reconfigure", None)  # not of what stands in for it
    if reconfigure is not None:
        reconfigure(errors="surrogateescape")  # the tokenizer refuses such a message
    if prompts and sys.stdout.isatty():
        _use_readline()
        return input
    return _prompted if prompts else _plain


def _plain(prompt: str) -> str:
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n").removesuffix("\r")


def _prompted(prompt: str) -> str:
    sys.stderr.write(prompt)
    sys.stderr.flush()
    return _plain(prompt)


def _use_readline() -> None:
    """Line editing, the lines of earlier chats, and Tab for the names of commands."""
    try:
        import readline
    except ImportError:  # a Python without it
        return
    import atexit

    try:
        history = _history_file()
        history.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(history, os.O_CREAT | os.O_APPEND, 0o600))
        readline.read_history_file(history)
        readline.set_history_length(KEPT_LINES)
        atexit.register(_write_history, readline.write_history_file, history)
    except (OSError, RuntimeError):  # no home
        pass  # a chat without the lines of earlier ones
    names = sorted([*COMMANDS, "/retry", *ALIASES])
    readline.set_completer_delims(" \n")
    readline.set_completer(lambda text, i: _completion(names, text, i))
    readline.parse_and_bind("tab: complete")


def _completion(names: list[str], text: str, index: int) -> str | None:
    found = [name for name in names if text.startswith("/") and name.startswith(text)]
    return f"{found[index]} " if index < len(found) else None


def _write_history(write: Callable[[Path], None], history: Path) -> None:
    try:
        write(history)
    except OSError:
        pass


def _history_file() -> Path:
    cache = os.environ.get("OCTAVO_CACHE") or Path.home() / ".cache" / "octavo"
    return Path(cache) / "chat_history"
