"""What an artifact holds, from its manifest alone: as JSON, and as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from compiler.inspect.quality import draft_quality, quality
from compiler.inspect.stages import stages
from compiler.inspect.tables import console
from runtime.errors import one_line

if TYPE_CHECKING:
    from runtime.artifact import Artifact


def summary(artifact: Artifact) -> dict[str, Any]:
    """The manifest without its lists of files and weights, and the bytes of each part."""
    raw = artifact.manifest.raw
    targets = {name: _without_order(each) for name, each in raw["targets"].items()}
    files = {name: entry.bytes for name, entry in artifact.manifest.files.items()}
    return {
        **{
            key: raw.get(key)
            for key in ("name", "digest", "made_by", "source", "model", "tokenizer", "kv_groups")
        },
        "targets": targets,
        "stages": [stage.name for stage in stages(artifact)],
        "kv_bytes_per_token": sum(g["bytes_per_token"] for g in raw["kv_groups"] if not g.get("tail")),
        "num_weights": max(len(each.weight_order) for each in artifact.manifest.targets.values()),
        "bytes": {"total": sum(files.values()), "files": files},
    }


def _without_order(target: dict[str, Any]) -> dict[str, Any]:
    """A target, and its draft."""
    found = {key: value for key, value in target.items() if key != "weight_order"}
    if isinstance(found.get("draft"), dict):
        found["draft"] = _without_order(found["draft"])
    return found


def show(artifact: Artifact) -> None:
    from rich.table import Table

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
        *(("quantised", text) for text in quality(model.get("quantization"))),
        ("frozen", ", ".join(f"{k}={v}" for k, v in model.get("frozen", {}).items()) or "nothing"),
        ("tokenizer", ", ".join(artifact.manifest.tokenizer_files) or "none"),
        *[("weights", "none: to inspect and to measure, not to load")] * _without_weights(facts),
        *(("kv group", _group(group)) for group in facts["kv_groups"]),
        ("kv in all", f"{facts['kv_bytes_per_token']:,} bytes per token"),
        *(("target", text) for name, each in facts["targets"].items() for text in _target(name, each)),
        ("stages", _stages(facts["stages"])),
        *(("bytes", f"{size:>15,}  {name}") for name, size in _by_folder(facts["bytes"]["files"]).items()),
        ("bytes", f"{facts['bytes']['total']:>15,}  in all"),
    ]
    for row in rows:
        table.add_row(*map(one_line, row))
    console().print(table)


def _without_weights(facts: dict[str, Any]) -> bool:
    return all(target["weights"] is None for target in facts["targets"].values())


def _stages(names: list[str]) -> str:
    shown = ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]} (--stages lists all)"
    more = "; those of the passes are kept by octavo compile --dump-ir DIR"
    return f"{shown}, shown by --ir{'' if any(name[:1].isdecimal() for name in names) else more}"


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
    streams = ", ".join(f"{s['name']} {_format(s)}[{s['heads']},{s['head_size']}]" for s in group["streams"])
    lifetime = "full" if group.get("window") is None else f"window {group['window']}"
    lifetime = "tail" if group.get("tail") else lifetime
    if group.get("state"):
        return (
            f"{group['layers']} layers, state, {streams}, blocks of {group['block']}: "
            f"{group['block_bytes']:,} bytes per block, whatever a request's tokens"
        )
    return (
        f"{group['layers']} layers, {lifetime}, {streams}, blocks of {group['block']}: "
        f"{group['bytes_per_token']:,} bytes per token"
    )


def _format(stream: dict[str, Any]) -> str:
    shown = {"channel": " per channel", "block": " per block"}
    return stream["dtype"] + shown.get(stream.get("per", ""), "")


def _target(name: str, target: dict[str, Any]) -> list[str]:
    """A line for each library of the CPU target, or for a GPU target."""
    if name != "cpu":
        built = ", ".join(f"{tool} {version}" for tool, version in target["built_by"].items())
        ways = ["one order of accumulation"] * target["invariant"] + [f"built by {built}"] * bool(built)
        return [f"{name}{': ' if ways else ''}{', '.join(ways)}"]
    libraries = [
        f"cpu: {k['isa']} for {k['arch']} with {', '.join(k['features']) or 'no extensions'}"
        for k in target["kernels"]
    ]
    draft = target.get("draft")
    return libraries if draft is None else [*libraries, *_draft(draft)]


def _draft(draft: dict[str, Any]) -> list[str]:
    """What it has of its own: all else, its KV blocks too, is the target's."""
    levels = ", ".join(k["isa"] for k in draft["kernels"])
    shared = "on the target's KV blocks, with its tokenizer"
    return [
        f"cpu draft: {text}" for text in (f"{levels}, {shared}", *draft_quality(draft.get("quantization")))
    ]
