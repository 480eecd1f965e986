"""Errors of the Python interface name its arguments; the command says them as they are typed."""

from __future__ import annotations

import inspect
from dataclasses import fields

import pytest
import typer

import runtime
from compiler.cli.errors import OPTIONS, RENAMED, describe
from compiler.cli.main import COMMANDS
from runtime.errors import OctavoError


@pytest.fixture(scope="module")
def typed() -> set[str]:
    """Every option of every command."""
    app = typer.Typer(add_completion=False)
    for name, command in COMMANDS.items():
        app.command(name)(command)
    commands = typer.main.get_command(app).commands.values()  # type: ignore[attr-defined]
    return {option for command in commands for param in command.params for option in param.opts}


def option(argument: str) -> str:
    return RENAMED.get(argument) or f"--{argument.replace('_', '-')}"


def test_each_that_errors_name_is_an_option(typed: set[str]) -> None:
    assert {option(name) for name in OPTIONS} <= typed


def test_each_argument_that_is_an_option_is_said_so(typed: set[str]) -> None:
    functions = (runtime.load, runtime.plan, runtime.generate)
    named = {name for function in functions for name in inspect.signature(function).parameters}
    named |= {field.name for field in fields(runtime.Sampling)}
    for name in sorted(name for name in named if option(name) in typed):
        said = describe(OctavoError(f"{name} = 7", where="somewhere"))
        assert said == f"{option(name)}: it cannot be 7", name
