"""What a mistake in the command line's own words was: the parser's message, in the parts of every error."""

from __future__ import annotations

import re
from typing import Any

import typer

UsageError = typer.BadParameter.__mro__[1]  # typer exports no name for it
FORMS = (
    (r"Invalid value for '?(?P<where>-[^' ]*)[^:]*: (?P<what>.*)", "{what}"),
    (r"Invalid value for '?(?P<where>[^':]*)'?: (?P<what>.*)", "{what}"),
    (r"No such option: (?P<where>\S+)(?P<what>.*)", "there is no such option{what}"),
    (r"No such command '(?P<where>.*)'(?P<what>.*)", "there is no such command{what}"),
    (r"Option '(?P<where>[^']*)' (?P<what>.*)", "it {what}"),
    (r"Missing option '(?P<where>[^']*)'(?P<what>.*)", "it is missing"),
    (r"Missing argument '(?P<where>.*)'(?P<what>.*)", "it is missing"),
    (r"Got unexpected extra arguments?(?:\(s\))? \((?P<where>.*)\)(?P<what>.*)", "nothing is expected there"),
)


def usage(error: Any, command: str) -> tuple[str, str, str]:
    """What was wrong, where, and what to do. command: the subcommand that was called, where there is one."""
    said = " ".join(error.format_message().split()).removesuffix(".")
    context = getattr(error, "ctx", None)
    path = context.command_path if context else f"octavo {command}".strip()
    todo = f"See {path} --help"
    for form, what in FORMS:
        found = re.fullmatch(form, said)
        if found is not None:
            return what.format(what=found["what"]), found["where"], todo
    return said, "", todo
