"""`octavo inspect`: what is in an engine artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

import runtime
from compiler.cli import values
from compiler.cli.options import EnginePath, KvBlocks, KvMemory, MaxRequests, MaxStepTokens, SwapMemory, given
from compiler.cli.streams import for_terminal
from compiler.errors import CompileError
from compiler.inspect.stages import TODO, StageFile, count_ops, find_stage, stages
from compiler.inspect.summary import show, summary


def command(
    engine: EnginePath,
    target: Annotated[
        str | None,
        typer.Option(
            help="Of the targets that it was compiled for, the one to show.", autocompletion=values.targets
        ),
    ] = None,
    list_stages: Annotated[
        bool, typer.Option("--stages", help="List the stages: the graph after each pass, and each target's.")
    ] = False,
    ir: Annotated[
        str | None,
        typer.Option(
            "--ir",
            help="Print a stage's graph, by number, name or pass: 'graph' is what the kernels run.",
            metavar="STAGE",
            autocompletion=values.stages,
        ),
    ] = None,
    diff: Annotated[
        tuple[str, str] | None,
        typer.Option(
            "--diff",
            help="What differs between two stages, by layer: ops removed, added and changed.",
            metavar="STAGE STAGE",
            autocompletion=values.stages,
        ),
    ] = None,
    graph: Annotated[
        Path | None,
        typer.Option(
            "--graph",
            help="Write the graph of --ir's stage, or 'graph', for other tools: FILE.dot or FILE.graphml.",
            metavar="FILE",
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            help="Write one page with everything: graphs, what passes change, memory, kernels. It needs no "
            "network.",
            metavar="FILE",
        ),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels",
            help="What every kernel takes of its device, and the least time of all its launches in a step "
            "(docs/gpu.md explains the columns). No GPU is needed.",
        ),
    ] = False,
    requests: Annotated[
        int | None,
        typer.Option(help="With --kernels or --html: requests in the step. Default 16.", min=1, max=2**16),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Cached tokens of each before it. Default 2048.", min=0)
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="New tokens of each. Default: a decode step, and a prefill of 2048 of one request.", min=1
        ),
    ] = None,
    memory: Annotated[
        bool,
        typer.Option(
            "--memory", help="What loading takes of memory, part by part, beside what is free. Takes none."
        ),
    ] = False,
    kv_memory: KvMemory = None,
    kv_blocks: KvBlocks = None,
    swap_memory: SwapMemory = None,
    max_step_tokens: MaxStepTokens = None,
    max_requests: MaxRequests = None,
    length: Annotated[
        list[int] | None,
        typer.Option(help="With --memory: how many requests of so many tokens fit at once. Repeatable."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object; of --kernels and --stages, a list.")
    ] = False,
) -> None:
    """Say what an artifact holds, what it needs, and how many bytes everything takes.

    octavo inspect model.octavo

    octavo inspect model.octavo --ir graph

    octavo inspect model.octavo --diff 07 fuse_norm

    octavo inspect model.octavo --ir 13 --graph paged.dot

    octavo inspect model.octavo --html model.html

    octavo inspect model.octavo --kernels --target cuda:sm_90

    octavo inspect model.octavo --kernels --requests 64 --context 4000 --json

    octavo inspect model.octavo --memory --kv-memory 2GiB --length 500 --length 4000
    """
    options = given(
        kv_memory=kv_memory,
        kv_blocks=kv_blocks,
        swap_memory=swap_memory,
        max_step_tokens=max_step_tokens,
        max_requests=max_requests,
    )
    _one_view(memory, list_stages, diff, graph, html, kernels)
    if ir is not None and any((memory, list_stages, diff, html, kernels)):
        raise CompileError("goes with --graph alone", where="--ir", todo="Leave one of the options out")
    if memory:
        _memory(engine, target, options, length or [], as_json)
        return
    for name in (*options, *given(length=length)):
        raise CompileError("goes with --memory", where=f"--{name.replace('_', '-')}", todo="Add --memory")
    artifact = runtime.Artifact.open(engine, verify="fast")
    if target is not None:
        artifact.target(target)  # it must be there
    step = (requests, context, tokens)
    if list_stages:
        _list_stages(artifact, target, as_json)
    elif diff is not None:
        _diff(artifact, [find_stage(artifact, name, target) for name in diff], as_json)
    elif graph is not None:
        _graph(artifact, find_stage(artifact, ir or "graph", target), graph, as_json)
    elif html is not None:
        _html(artifact, html, step, as_json)
    elif ir is not None:
        _ir(artifact, find_stage(artifact, ir, target), as_json)
    elif kernels:
        _kernels(artifact, target, step, as_json)
    elif as_json:
        print(json.dumps(summary(artifact)))
    else:
        show(artifact)


def _one_view(*asked: object) -> None:
    names = ("--memory", "--stages", "--diff", "--graph", "--html", "--kernels")
    chosen = [name for name, value in zip(names, asked, strict=True) if value]
    if len(chosen) > 1:
        raise CompileError("show different things", where=" and ".join(chosen), todo="Give one of them")


def _memory(
    engine: Path, target: str | None, options: dict[str, Any], lengths: list[int], as_json: bool
) -> None:
    plan = runtime.plan(engine, target=target, **options)
    print(json.dumps(plan.as_json(lengths)) if as_json else plan.text(lengths))


def _list_stages(artifact: runtime.Artifact, target: str | None, as_json: bool) -> None:
    found = [(stage.name, count_ops(stage.read(artifact)), stage.file) for stage in stages(artifact, target)]
    if as_json:
        print(json.dumps([{"stage": name, "ops": ops, "file": file} for name, ops, file in found]))
        return
    width = max(len(name) for name, _, _ in found)
    for name, ops, file in found:
        print(f"{name:{width}}  {ops:6,} ops  {file}")
    if all(stage.number is None for stage in stages(artifact, target)):
        print(f"{TODO}.")


def _ir(artifact: runtime.Artifact, stage: StageFile, as_json: bool) -> None:
    text = stage.read(artifact)
    about = {"stage": stage.name, "file": stage.file, "ops": count_ops(text), "ir": text}
    print(json.dumps(about) + "\n" if as_json else for_terminal(text), end="")


def _diff(artifact: runtime.Artifact, two: list[StageFile], as_json: bool) -> None:
    from rich.console import Console

    from compiler.inspect.diff import diff
    from compiler.inspect.diff_text import as_json as diff_json
    from compiler.inspect.diff_text import lines
    from compiler.inspect.graph_of import graph_of

    before, after = (stage.name for stage in two)
    found = diff(*(graph_of(artifact, stage) for stage in two))
    if as_json:
        print(json.dumps(diff_json(found, before, after)))
        return
    console = Console(soft_wrap=True, markup=False, highlight=False, emoji=False)
    for line in lines(found, before, after):
        console.print(line)


def _graph(artifact: runtime.Artifact, stage: StageFile, path: Path, as_json: bool) -> None:
    from compiler.inspect.files import check_place, write_whole
    from compiler.inspect.graph_of import graph_of
    from compiler.inspect.graphs import network, writer

    check_place(path)
    as_text = writer(path)
    found = network(graph_of(artifact, stage))
    write_whole(path, as_text(found))
    told = {"stage": stage.name, "nodes": len(found.nodes), "edges": len(found.edges)}
    if as_json:
        print(json.dumps({"file": str(path), **told}))
    else:
        print(f"{path}: {stage.name}, {told['nodes']:,} nodes, {told['edges']:,} edges")


def _html(
    artifact: runtime.Artifact, path: Path, step: tuple[int | None, int | None, int | None], as_json: bool
) -> None:
    from compiler.inspect.files import check_place, write_whole
    from compiler.inspect.page import page

    check_place(path)
    text, told = page(artifact, step)
    write_whole(path, text)
    num_bytes = len(text.encode())
    if as_json:
        print(json.dumps({"file": str(path), "bytes": num_bytes, **told}))
        return
    print(f"{path}: {num_bytes / 1e6:.1f} MB, {told['stages']} stages. Open it in a browser")
    if told["stages"] == len(artifact.manifest.targets):
        print(f"It shows the lowered graph alone. {TODO}.")


def _kernels(
    artifact: runtime.Artifact,
    target: str | None,
    step: tuple[int | None, int | None, int | None],
    as_json: bool,
) -> None:
    from compiler.cli.kernels import show as show_kernels
    from compiler.kernels import kernel_figures, step_shapes

    shapes = step_shapes(artifact.manifest.model.max_context, *step)
    names = [target] if target is not None else list(artifact.manifest.targets)
    found = [row for name in names for row in kernel_figures(artifact, name, shapes)]
    if as_json:
        print(json.dumps([row.json for row in found]))
    else:
        show_kernels(found, list(shapes))
