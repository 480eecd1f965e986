"""The `octavo` command: its subcommands, and how errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import typer

from compiler.cli.errors import report

COMMANDS = ("compile", "generate", "inspect", "opt", "bench", "profile")  # modules of compiler.cli


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 our fault, 2 a fault in what was asked, 130 interrupted."""
    _open_missing_streams()
    given = sys.argv[1:] if args is None else list(args)
    try:
        code = _app(given[:1])(args=given or ["--help"], prog_name="octavo", standalone_mode=False)
    except Exception as error:
        code = report(error)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _app(named: Sequence[str]) -> typer.Typer:
    """The commands, or of them the named one alone: what the others import takes time."""
    app = typer.Typer(
        name="octavo",
        help="Compile a language model's checkpoint into an engine artifact and run it.\n\n"
        "octavo compile CHECKPOINT -o model.octavo\n\n"
        'octavo generate model.octavo "The capital of France is"',
        add_completion=False,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)  # a group, even around one command
    for name in [c for c in COMMANDS if c in named] or COMMANDS:
        app.command(name)(import_module(f"compiler.cli.{name}").command)
    return app


def _open_missing_streams() -> None:
    """Python has None for a standard stream that the caller closed: what is written there goes nowhere."""
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


if __name__ == "__main__":
    main()
