"""The `octavo` command: its subcommands, and how errors end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

import typer

from compiler.cli import streams
from compiler.cli.errors import debug_level, report

COMMANDS = ("compile", "generate", "inspect", "opt", "bench", "profile")  # modules of compiler.cli


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 our fault, 2 a fault in what was asked, 130 interrupted."""
    streams.prepare()
    given = sys.argv[1:] if args is None else list(args)
    try:
        with streams.quiet_libraries() if not debug_level() else nullcontext():
            code = _app(given[:1])(args=given or ["--help"], prog_name="octavo", standalone_mode=False)
        sys.stdout.flush()
    except (Exception, SystemExit) as error:
        code = _end(error, given)
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)


def _end(error: Exception | SystemExit, given: Sequence[str]) -> int:
    """The exit code. Whoever reads the output and has enough of it (`octavo ... | head -1`) is no error."""
    if isinstance(error, BrokenPipeError | SystemExit) and streams.reader_is_gone():  # which typer exits at
        streams.drop_stdout()
        return 0
    return int(error.code or 0) if isinstance(error, SystemExit) else report(error, given)


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


if __name__ == "__main__":
    main()
