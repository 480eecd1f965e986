"""`octavo opt`: run passes over a graph's text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from compiler.cli.errors import debug_level
from compiler.errors import CompileError

if TYPE_CHECKING:
    from ir.graph import Graph
    from passes.base import Pass, Result


def command(
    file: Annotated[str, typer.Argument(help="A graph as text; - reads it from stdin.")] = "-",
    passes: Annotated[
        str, typer.Option("--passes", "-p", help="Passes in order, with options: 'cse,page_kv{block=16}'.")
    ] = "",
    list_passes: Annotated[bool, typer.Option("--list", help="List the passes and their options.")] = False,
) -> None:
    """Read a graph's text, run passes over it, and print the text of the result.

    octavo opt 00-imported.ir -p canonicalize,fuse_norm

    octavo inspect model.octavo --ir graph | octavo opt - -p dce,cse
    """
    from compiler.cli.terminal import Terminal
    from compiler.pass_text import describe, parse_passes
    from compiler.pipeline import pipeline
    from ir.text import print_graph

    known = list(dict.fromkeys(type(each) for each in pipeline()))
    if list_passes:
        print("\n".join(describe(kind) for kind in known))
        return
    wanted = parse_passes(passes, known)
    graph = _read(file)
    with Terminal() as shown:
        for each in wanted:
            shown.stage(each.name)
            result = _run(each, graph, file)
            graph = result.graph
            if not debug_level():
                print(f"{each.name}: {result.count}", file=sys.stderr)
            shown.graph(each.name, graph, result.count, result.misses)
    print(print_graph(graph), end="")


def _run(each: Pass, graph: Graph, file: str) -> Result:
    """A pass's result. Raises CompileError where it refuses the graph."""
    from compiler.refusal import refusal
    from ir.verify import verify
    from passes.base import PassError

    try:
        result = each.run(graph)
        verify(result.graph)
    except PassError as error:
        raise refusal(error, file) from error
    except ValueError as error:  # a graph from elsewhere than where the pass stands in the pipeline
        what = f"{each.name} does not apply to this graph: {error}"
        todo = "Give the graph of the stage before it: octavo compile --dump-ir DIR writes all"
        raise CompileError(what, where=file, todo=todo) from error
    return result


def _read(file: str) -> Graph:
    """The graph in a file. Raises CompileError where it is not one, or not a valid one."""
    from compiler.refusal import OF_A_TEXT, refusal
    from ir.text import parse
    from ir.verify import verify

    if file != "-" and not Path(file).is_file():
        todo = "octavo compile --dump-ir DIR writes some; - reads stdin"
        raise CompileError("not a file" if Path(file).exists() else "no such file", where=file, todo=todo)
    try:
        graph = parse(sys.stdin.read() if file == "-" else Path(file).read_text())
        verify(graph)
    except OF_A_TEXT as error:
        raise refusal(error, file) from error
    except UnicodeDecodeError as error:
        todo = "Give a graph's text, as octavo compile --dump-ir writes it"
        raise CompileError(f"not UTF-8 ({error})", where=file, todo=todo) from error
    return graph
