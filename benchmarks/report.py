"""A results file as a table, in the terminal or in Markdown, or as a plot."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sidebyside import plot, results, summary, table


def command(
    path: Annotated[Path, typer.Argument(help="A results file.")],
    markdown: Annotated[bool, typer.Option(help="The table as Markdown.")] = False,
    draw: Annotated[Path | None, typer.Option("--plot", help="Write a plot, .svg or .png.")] = None,
) -> None:
    """Print the table of a results file; with --plot draw it too."""
    rows = list(summary.rows(results.read(path)))
    if markdown:
        print(table.markdown(rows))
    else:
        Console(width=120).print(table.terminal(rows))
    if draw:
        plot.draw(rows, draw, results.cpu_of(path))


if __name__ == "__main__":
    try:
        typer.run(command)
    except results.ResultsError as error:
        sys.exit(f"error: {error}")
