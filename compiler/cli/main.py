"""The `octavo` command: its subcommands, and how errors end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Annotated

import typer

from compiler.cli import (
    bench,
    chat,
    compile,
    completion,
    explain,
    generate,
    inspect,
    opt,
    profile,
    rebuild,
    streams,
)
from compiler.cli.errors import check_debug, debug_level, report
from compiler.cli.help import help_text

COMMANDS = {
    "compile": compile.command,
    "generate": generate.command,
    "chat": chat.command,
    "inspect": inspect.command,
    "explain": explain.command,
    "rebuild": rebuild.command,
    "opt": opt.command,
    "bench": bench.command,
    "profile": profile.command,
}

ABOUT = """Compile a language model's checkpoint into an engine artifact and run it.

octavo compile CHECKPOINT -o model.octavo

octavo generate model.octavo "The capital of France is"

octavo chat model.octavo
"""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 our fault, 2 a fault in what was asked, 130 interrupted."""
    streams.prepare()
    given = sys.argv[1:] if args is None else list(args)
    if completion.is_asked():
        sys.exit(completion.complete(_app()))
    check_debug()
    try:
        if given[:1] and given[0] in completion.OPTIONS:
            completion.check_shell(given[0])
        with streams.quiet_libraries() if not debug_level() else nullcontext():
            code = _app()(args=given or ["--help"], prog_name="octavo", standalone_mode=False)
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


def _print_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"octavo {version('octavo')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """The options that stand before a command."""


def _app() -> typer.Typer:
    app = typer.Typer(
        name="octavo",
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(help=help_text(ABOUT))(_root)
    for name, command in COMMANDS.items():
        app.command(name, help=help_text(command.__doc__))(command)
    return app


if __name__ == "__main__":
    main()
