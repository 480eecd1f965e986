"""The `octavo` command: its subcommands, and how errors end."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import typer

from compiler.cli import bench, compile, generate, inspect, opt, profile
from compiler.cli.errors import report

app = typer.Typer(
    name="octavo",
    help="Compile a language model's checkpoint into an engine artifact and run it.\n\n"
    "octavo compile CHECKPOINT -o model.octavo\n\n"
    'octavo generate model.octavo "The capital of France is"',
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compile")(compile.command)
app.command("generate")(generate.command)
app.command("inspect")(inspect.command)
app.command("opt")(opt.command)
app.command("bench")(bench.command)
app.command("profile")(profile.command)


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 our fault, 2 a fault in what was asked, 130 interrupted."""
    _open_missing_streams()
    try:
        app(args=None if args is None else list(args), prog_name="octavo")
    except Exception as error:
        sys.exit(report(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _open_missing_streams() -> None:
    """Python has None for a standard stream that the caller closed: what is written there goes nowhere."""
    sys.stdin = sys.stdin or open(os.devnull)
    sys.stdout = sys.stdout or open(os.devnull, "w")
    sys.stderr = sys.stderr or open(os.devnull, "w")


if __name__ == "__main__":
    main()
