"""What a mistake in the command line's own words was: the parser's message, in the parts of every error."""

from __future__ import annotations

import re
from typing import Any

import typer

UsageError = typer.BadParameter.__mro__[1]  # typer exports no name for it
FORMS = (
    (r"Invalid value for '?(?P<where>-[^' ]*)[^:]*: (?P<what>.*)", "{what}"),
    (r"Invalid value for '?(?P<where>[^':]*)'?: (?P<what>.*)", "{what}"),
    (r"No such option: (?P<where>[^\s.]+)(?P<what>.*)", "there is no such option"),
    (r"No such command '(?P<where>[^']*)'(?P<what>.*)", "there is no such command"),
    (r"Option '(?P<where>[^']*)' (?P<what>.*)", "it {what}"),
    (r"Missing option '(?P<where>[^']*)'(?P<what>.*)", "it is missing"),
    (r"Missing argument '(?P<where>.*)'(?P<what>.*)", "it is missing"),
    (
        r"Got unexpected extra arguments?(?:\(s\))? \((?P<where>.*)\)(?P<what>.*)",
        "more than the command takes",
    ),
)


def usage(error: Any, command: str) -> tuple[str, str, str]:
    """What was wrong, where, and what to do. command: the subcommand that was called, where there is one."""
    said = " ".join(error.format_message().split()).removesuffix(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else f"octavo {command}".strip()
    for form, what in FORMS:
        found = re.fullmatch(form, said)
        if found is not None:
            todo = f"{_advice(what, found, path)}See {path} --help"
            return what.format(what=found["what"]) + _meaning(error), found["where"], todo
    return said, "", f"See {path} --help"


def _advice(what: str, found: re.Match[str], path: str) -> str:
    """Before the help: the names that are near what was typed, or how a text of several words is given."""
    if what == "more than the command takes" and path.endswith("generate"):
        return "Put quotes around a prompt of several words. "
    if not what.startswith("there is no such"):
        return ""
    names = [name for name in re.findall(r"-*\w[\w-]*", found["what"].partition(":")[2]) if name != "--help"]
    names = names or re.findall(r"'([^']*)'", found["what"])
    begun = [name for name in names if name.startswith(found["where"])] or names
    return f"Did you mean {' or '.join(begun)}? " if begun else ""


def _meaning(error: Any) -> str:
    """Of an argument or an option that is missing: what it is."""
    text = getattr(getattr(error, "param", None), "help", None)
    if not text or type(error).__name__ != "MissingParameter":
        return ""
    return f": {text[0].lower()}{text[1:].removesuffix('.')}"
