"""`octavo opt`: run passes over a graph's text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from compiler.errors import CompileError


def command(
    file: Annotated[str, typer.Argument(help="A graph as text; - reads it from stdin.")] = "-",
    passes: Annotated[
        str, typer.Option("--passes", "-p", help="Passes in order, with options: 'cse,page_kv{block=16}'.")
    ] = "",
    list_passes: Annotated[bool, typer.Option("--list", help="List the passes and their options.")] = False,
) -> None:
    """Read a graph's text, run passes over it, and print the text of the result.

    octavo opt model.ir -p canonicalize,fuse_norm

    octavo inspect model.octavo --ir graph | octavo opt - -p 'dce,cse'
    """
    if list_passes:
        return _list()
    from compiler.passes_text import parse_passes
    from ir import text, verify

    graph = text.parse(_read(file), file=file)
    verify.verify(graph)
    for each in parse_passes(passes):
        result = each.run(graph)
        graph = result.graph
        verify.verify(graph)
        print(f"// {each.name}: {result.count}", file=sys.stderr)
    print(text.print_graph(graph), end="")


def _list() -> None:
    from compiler.passes_text import describe_passes

    for line in describe_passes():
        print(line)


def _read(file: str) -> str:
    if file == "-":
        return sys.stdin.read()
    path = Path(file)
    if not path.is_file():
        raise CompileError(f"{file}: no such file. Dump graphs with octavo compile --dump-ir DIR, or use - for stdin.")
    return path.read_text()
