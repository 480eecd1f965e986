"""`octavo inspect`: what is in an engine artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

import runtime
from compiler.cli.options import KvBlocks, KvMemory, MaxRequests, MaxStepTokens, SwapMemory, given
from compiler.errors import CompileError
from runtime.artifact import Artifact


def command(
    engine: Annotated[Path, typer.Argument(help="An engine artifact, NAME.octavo.")],
    target: Annotated[
        str | None, typer.Option(help="Of the targets that it was compiled for, the one to show.")
    ] = None,
    ir: Annotated[
        str | None, typer.Option("--ir", help="Print a stage's graph: 'graph' is what the kernels run.")
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
        int | None, typer.Option(help="With --kernels: requests in the step. Default 16.", min=1, max=2**16)
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
        bool, typer.Option("--json", help="Print one JSON object; of --kernels, a list.")
    ] = False,
) -> None:
    """Say what an artifact holds, what it needs, and how many bytes everything takes.

    octavo inspect model.octavo

    octavo inspect model.octavo --ir graph

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
    if memory:
        _memory(engine, target, options, length or [], as_json)
        return
    for name in (*options, *given(length=length)):
        raise CompileError(f"--{name.replace('_', '-')}: goes with --memory. Add it")
    artifact = Artifact.open(engine, verify="fast")
    if target is not None:
        artifact.target(target)  # it must be there
    if ir is not None:
        print(_stage(artifact, ir, target), end="")
    elif kernels:
        _kernels(artifact, target, (requests, context, tokens), as_json)
    elif as_json:
        print(json.dumps(summary(artifact)))
    else:
        _show(artifact)


def _memory(
    engine: Path, target: str | None, options: dict[str, Any], lengths: list[int], as_json: bool
) -> None:
    plan = runtime.plan(engine, target=target, **options)
    print(json.dumps(plan.as_json(lengths)) if as_json else plan.text(lengths))


def _kernels(
    artifact: Artifact, target: str | None, step: tuple[int | None, int | None, int | None], as_json: bool
) -> None:
    from compiler.cli.kernels import show
    from compiler.kernels import kernel_figures, step_shapes

    shapes = step_shapes(artifact.manifest.model.max_context, *step)
    names = [target] if target is not None else list(artifact.manifest.targets)
    found = [row for name in names for row in kernel_figures(artifact, name, shapes)]
    if as_json:
        print(json.dumps([row.json for row in found]))
    else:
        show(found, list(shapes))


def stages(artifact: Artifact, target: str | None = None) -> dict[str, str]:
    """The file of each graph in the artifact, by stage; those before a target's only after --dump-ir.

    `graph` is the target's, or the first target's, and `graph-TARGET` that of each where there are several.
    """
    dumped = sorted(name for name in artifact.manifest.files if name.startswith("stages/"))
    found = {Path(name).stem: name for name in dumped}
    targets = artifact.manifest.targets
    if len(targets) > 1:
        found |= {f"graph-{name.replace(':', '-')}": each.graph for name, each in targets.items()}
    return found | {"graph": artifact.target(target or next(iter(targets))).graph}


def _stage(artifact: Artifact, wanted: str, target: str | None) -> str:
    available = stages(artifact, target)
    matches = [file for stage, file in available.items() if wanted in (stage, stage.partition("-")[2])]
    if not matches:
        raise CompileError(
            f"{artifact.root}: has no stage {wanted!r}; it has {', '.join(available)}. "
            "Compile with --dump-ir DIR to keep every stage"
        )
    return artifact.read(matches[-1]).decode()


def summary(artifact: Artifact) -> dict[str, Any]:
    """The manifest without its lists of files and weights, and the bytes of each part."""
    raw = artifact.manifest.raw
    targets = {
        name: {key: value for key, value in each.items() if key != "weight_order"}
        for name, each in raw["targets"].items()
    }
    files = {name: entry.bytes for name, entry in artifact.manifest.files.items()}
    return {
        **{
            key: raw.get(key)
            for key in ("name", "digest", "made_by", "source", "model", "tokenizer", "kv_groups")
        },
        "targets": targets,
        "stages": list(stages(artifact)),
        "kv_bytes_per_token": sum(group["bytes_per_token"] for group in raw["kv_groups"]),
        "num_weights": max(len(each.weight_order) for each in artifact.manifest.targets.values()),
        "bytes": {"total": sum(files.values()), "files": files},
    }


def _show(artifact: Artifact) -> None:
    facts = summary(artifact)
    model, source = facts["model"], facts["source"]
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    rows = [
        ("artifact", facts["name"]),
        ("digest", facts["digest"].removeprefix("sha256:")),
        ("source", f"{source['kind']} {source['path']}"),
        ("made by", ", ".join(f"{k} {v}" for k, v in facts["made_by"].items())),
        ("model", f"{model['dtype']}, vocabulary {model['vocab_size']:,}, context {model['max_context']:,}"),
        ("frozen", ", ".join(f"{k}={v}" for k, v in model.get("frozen", {}).items()) or "nothing"),
        ("tokenizer", ", ".join(artifact.manifest.tokenizer_files) or "none"),
        *[("weights", "none: to inspect and to measure, not to load")] * _without_weights(facts),
        *(("kv group", _group(group)) for group in facts["kv_groups"]),
        ("kv in all", f"{facts['kv_bytes_per_token']:,} bytes per token"),
        *(("target", text) for name, each in facts["targets"].items() for text in _target(name, each)),
        ("stages", f"{_span(facts['stages'])}, shown by --ir"),
        *(("bytes", f"{size:>15,}  {name}") for name, size in _by_folder(facts["bytes"]["files"]).items()),
        ("bytes", f"{facts['bytes']['total']:>15,}  in all"),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


def _without_weights(facts: dict[str, Any]) -> bool:
    return all(target["weights"] is None for target in facts["targets"].values())


def _span(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"


def _by_folder(files: dict[str, int]) -> dict[str, int]:
    """Bytes by file, those of all stages and of all bundled sources added up."""
    found: dict[str, int] = {}
    for name, size in files.items():
        shown = "stages/" if name.startswith("stages/") else name
        shown = f"{name.rpartition('/')[0]}/ (source)" if name.endswith((".h", ".cpp")) else shown
        shown = f"{name.rpartition('/')[0]}/ (binaries)" if name.endswith((".cubin", ".hsaco")) else shown
        found[shown] = found.get(shown, 0) + size
    return found


def _group(group: dict[str, Any]) -> str:
    streams = ", ".join(f"{s['name']} {s['dtype']}[{s['heads']},{s['head_size']}]" for s in group["streams"])
    lifetime = "full" if group.get("window") is None else f"window {group['window']}"
    return (
        f"{group['layers']} layers, {lifetime}, {streams}, blocks of {group['block']}: "
        f"{group['bytes_per_token']:,} bytes per token"
    )


def _target(name: str, target: dict[str, Any]) -> list[str]:
    """A line for each library of the CPU target, or for a GPU target."""
    if name != "cpu":
        built = ", ".join(f"{tool} {version}" for tool, version in target["built_by"].items())
        ways = ["one order of accumulation"] * target["invariant"] + [f"built by {built}"] * bool(built)
        return [f"{name}{': ' if ways else ''}{', '.join(ways)}"]
    return [
        f"cpu: {k['isa']} for {k['arch']} with {', '.join(k['features']) or 'no extensions'}"
        for k in target["kernels"]
    ]
