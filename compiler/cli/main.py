"""The `octavo` command: its subcommands, and how errors end."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext

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


def _app() -> typer.Typer:
    app = typer.Typer(
        name="octavo",
        help="Compile a language model's checkpoint into an engine artifact and run it.\n\n"
        "octavo compile CHECKPOINT -o model.octavo\n\n"
        'octavo generate model.octavo "The capital of France is"\n\n'
        "octavo chat model.octavo",
        rich_markup_mode="markdown",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for name, command in COMMANDS.items():
        app.command(name)(command)
    return app


if __name__ == "__main__":
    main()
