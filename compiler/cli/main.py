"""The `octavo` command: its subcommands, and how errors end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from importlib import import_module

import typer

from compiler.cli import completion, streams
from compiler.cli.declared import declared

COMMANDS = (
    "compile",
    "generate",
    "chat",
    "inspect",
    "explain",
    "rebuild",
    "opt",
    "bench",
    "profile",
)  # modules of compiler.cli


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 our fault, 2 a fault in what was asked, 130 interrupted."""
    streams.prepare()
    given = sys.argv[1:] if args is None else list(args)
    if completion.is_asked():
        sys.exit(completion.complete(_app(completion.words()[:1])))
    from compiler.cli.errors import check_debug, debug_level  # not before: a shell waits for completions

    check_debug()
    try:
        if given[:1] and given[0] in completion.OPTIONS:
            completion.check_shell(given[0])
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
    from compiler.cli.errors import report

    return int(error.code or 0) if isinstance(error, SystemExit) else report(error, given)


def _app(named: Sequence[str]) -> typer.Typer:
    """The named command, or the declarations of all: what they import takes time."""
    asked = completion.is_asked()
    found = [name for name in COMMANDS if name in named]
    app = typer.Typer(
        name="octavo",
        help="Compile a language model's checkpoint into an engine artifact and run it.\n\n"
        "octavo compile CHECKPOINT -o model.octavo\n\n"
        'octavo generate model.octavo "The capital of France is"\n\n'
        "octavo chat model.octavo",
        add_completion=asked or not found,
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(lambda: None)  # a group, even around one command
    for name in found or COMMANDS:
        if asked:
            command = completion.offering(declared(name))
        else:
            command = import_module(f"compiler.cli.{name}").command if found else declared(name)
        app.command(name)(command)
    return app


if __name__ == "__main__":
    main()
