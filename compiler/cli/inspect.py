"""`octavo inspect`: what is in an engine artifact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from compiler.errors import CompileError
from runtime.artifact import Artifact


def command(
    engine: Annotated[Path, typer.Argument(help="An engine artifact, NAME.octavo.")],
    ir: Annotated[
        str | None, typer.Option("--ir", help="Print a stage's graph: 'graph' is what the kernels run.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Say what an artifact holds, what it needs, and how many bytes everything takes.

    octavo inspect model.octavo

    octavo inspect model.octavo --ir graph
    """
    artifact = Artifact.open(engine, verify="fast")
    if ir is not None:
        print(_stage(artifact, ir), end="")
    elif as_json:
        print(json.dumps(summary(artifact)))
    else:
        _show(artifact)


def stages(artifact: Artifact) -> dict[str, str]:
    """The file of each graph in the artifact, by stage; those before `graph` only after --dump-ir."""
    dumped = sorted(name for name in artifact.manifest.files if name.startswith("stages/"))
    return {Path(name).stem: name for name in dumped} | {"graph": artifact.cpu.graph}


def _stage(artifact: Artifact, wanted: str) -> str:
    available = stages(artifact)
    matches = [file for stage, file in available.items() if wanted in (stage, stage.partition("-")[2])]
    if not matches:
        raise CompileError(
            f"{artifact.root}: has no stage {wanted!r}; it has {', '.join(available)}. "
            "Compile with --dump-ir DIR to keep every stage"
        )
    return artifact.read(matches[-1]).decode()


def summary(artifact: Artifact) -> dict[str, Any]:
    """The manifest without its lists of files and weights, and the bytes of each part."""
    raw, order = artifact.manifest.raw, artifact.cpu.weight_order
    cpu = {key: value for key, value in raw["targets"]["cpu"].items() if key != "weight_order"}
    files = {name: entry.bytes for name, entry in artifact.manifest.files.items()}
    return {
        **{
            key: raw.get(key)
            for key in ("name", "digest", "made_by", "source", "model", "tokenizer", "kv_groups")
        },
        "targets": {"cpu": cpu},
        "stages": list(stages(artifact)),
        "kv_bytes_per_token": sum(group["bytes_per_token"] for group in raw["kv_groups"]),
        "num_weights": len(order),
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
        *(("kv group", _group(group)) for group in facts["kv_groups"]),
        ("kv in all", f"{facts['kv_bytes_per_token']:,} bytes per token"),
        *(("kernel", _kernel(kernel)) for kernel in facts["targets"]["cpu"]["kernels"]),
        ("stages", f"{_span(facts['stages'])}, shown by --ir"),
        *(("bytes", f"{size:>15,}  {name}") for name, size in _by_folder(facts["bytes"]["files"]).items()),
        ("bytes", f"{facts['bytes']['total']:>15,}  in all"),
    ]
    for row in rows:
        table.add_row(*row)
    Console().print(table, markup=False)


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _by_folder(files: dict[str, int]) -> dict[str, int]:
    """Bytes by file, those of all stages and of all bundled sources added up."""
    found: dict[str, int] = {}
    for name, size in files.items():
        shown = "stages/" if name.startswith("stages/") else name
        shown = f"{name.rpartition('/')[0]}/ (source)" if name.endswith((".h", ".cpp")) else shown
        found[shown] = found.get(shown, 0) + size
    return found


def _group(group: dict[str, Any]) -> str:
    streams = ", ".join(f"{s['name']} {s['dtype']}[{s['heads']},{s['head_size']}]" for s in group["streams"])
    lifetime = "full" if group.get("window") is None else f"window {group['window']}"
    return (
        f"{group['layers']} layers, {lifetime}, {streams}, blocks of {group['block']}: "
        f"{group['bytes_per_token']:,} bytes per token"
    )


def _kernel(kernel: dict[str, Any]) -> str:
    return f"{kernel['isa']} for {kernel['arch']} with {', '.join(kernel['features']) or 'no extensions'}"
