"""One GPU: each kernel beside its bound and torch's, and steps of whole models beside torch.compile.

python benchmarks/gpu.py            measures, and writes docs/gpu.md's measured part and a file of results
python benchmarks/gpu.py --tables   writes docs/gpu.md's tables of kernels; it needs no GPU
python benchmarks/gpu.py --dry-run  runs a tiny model in Triton's interpreter: to see that all works
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from codegen.triton import DEVICES
from compiler.errors import CompileError
from compiler.kernels import kernel_figures, step_shapes
from gpubench import octavo, tables, workloads
from gpubench.workloads import Workload
from runtime import Artifact
from runtime.errors import OctavoError
from runtime.gpu.targets import find_api
from runtime.gpu.vendor import Api, Unavailable

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results"
DOCUMENT = ROOT / "docs" / "gpu.md"
DOCUMENTED = ("llama-3-8b", "cuda:sm_90")  # whose kernels docs/gpu.md lists


def command(
    model: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(workloads.MODELS)}; default all.")
    ] = None,
    repeats: Annotated[int, typer.Option(help="Figures are medians over so many.", min=1)] = 20,
    torch: Annotated[bool, typer.Option(help="Beside torch, which must be built for the GPU.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="A tiny model, interpreted.")] = False,
    only_tables: Annotated[
        bool, typer.Option("--tables", help="Only docs/gpu.md's list of kernels.")
    ] = False,
    document: Annotated[Path, typer.Option(help="Where the tables go.")] = DOCUMENT,
    out: Annotated[Path | None, typer.Option(help="The file of results.")] = None,
) -> None:
    """Measure one GPU."""
    with tempfile.TemporaryDirectory() as folder:
        if only_tables:
            tables.replace_section(document, "kernels", list_kernels(Path(folder)))
        elif dry_run:
            os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
            config = workloads.tiny_config(Path(folder) / "tiny")
            report([measure(config, "triton-interpret", Path(folder), workloads.TINY_WORKLOADS, 1, None)])
        else:
            measure_all(model or workloads.MODELS, Path(folder), repeats, torch, document, out)


def list_kernels(folder: Path) -> str:
    """The kernels that run in every layer, at a decode and a prefill step's shapes."""
    name, target = DOCUMENTED
    artifact = workloads.compiled(workloads.config_of(name), target, folder)
    layers = max(group.layers for group in artifact.manifest.kv_groups)
    shapes = step_shapes(artifact.manifest.model.max_context, None, None, None)
    figures = [row.json for row in kernel_figures(artifact, target, shapes)]
    parts = [
        f"{_told(step, shape.counts, shape.lens)}\n\n"
        f"{tables.markdown(tables.HEADINGS, tables.kernel_rows(figures, step, layers))}"
        for step, shape in shapes.items()
    ]
    return "\n" + "\n".join(parts) + "\n"


def _told(step: str, counts: Sequence[int], lens: Sequence[int]) -> str:
    tokens = "a new token" if counts[0] == 1 else f"{counts[0]:,} new tokens"
    requests = f"each of {len(counts)} requests" if len(counts) > 1 else "one request"
    return f"**{step.capitalize()}**: {tokens} of {requests}, {lens[0] - counts[0]:,} cached before:"


def measure_all(
    models: Sequence[str], folder: Path, repeats: int, torch: bool, document: Path, out: Path | None
) -> None:
    unknown = set(models) - set(workloads.MODELS)
    if unknown:
        raise typer.BadParameter(f"{min(unknown)}: choose from {', '.join(workloads.MODELS)}")
    api = _gpu()
    target = _target(api)
    beside = _torch(repeats) if torch else None
    found = [
        measure(workloads.config_of(name), target, folder, workloads.WORKLOADS, repeats, beside)
        for name in models
    ]
    text = report(found)
    taken = datetime.now(UTC).strftime("%Y-%m-%d")
    result = {"device": api.name, "arch": api.arch, "taken": taken, "repeats": repeats, "models": found}
    out = out or RESULTS / f"gpu-{'-'.join(api.name.lower().split())}-{taken}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    told = f"\nOn {api.name}, {taken}, medians over {repeats} (`benchmarks/results/{out.name}`).\n\n{text}"
    tables.replace_section(document, "measured", told)
    print(f"wrote {out} and {document}", file=sys.stderr)


def measure(
    config: Path, target: str, folder: Path, steps: Sequence[Workload], repeats: int, beside: Any
) -> dict[str, Any]:
    """One model's kernels and steps. beside: a gpubench.torch_side.Torch, or None."""
    print(f"{config.name}: compiling for {target}", file=sys.stderr)
    artifact = workloads.compiled(config, target, folder)
    found = [_measure_kernels(artifact, config, target, step, repeats, beside) for step in steps]
    print(f"{config.name}: whole steps", file=sys.stderr)
    with octavo.opened(artifact, target) as opened:
        times = octavo.time_steps(opened, steps, repeats)
    for step, each in zip(steps, found, strict=True):
        each["step_s"] = times[step.name]
        each["torch_s"] = beside and beside.step_s(config, step)
    return {"name": config.name, "target": target, "workloads": found}


def _measure_kernels(
    artifact: Artifact, config: Path, target: str, step: Workload, repeats: int, beside: Any
) -> dict[str, Any]:
    print(f"{config.name}: kernels of {step.name}", file=sys.stderr)
    with octavo.opened(artifact, target) as opened:
        times = octavo.time_kernels(opened, step, repeats)
    kernels = [
        asdict(each) | {"torch_us": beside and beside.kernel_us(each.op, each.operations, step, config)}
        for each in times
    ]
    return {
        "name": step.name, "requests": step.requests, "cached": step.cached,
        "tokens": step.requests * step.tokens, "kernels": kernels,
        "bound_us": sum(each.bound_us * each.count for each in times),
    }  # fmt: skip


def report(models: Sequence[dict[str, Any]]) -> str:
    """Print the tables, and return them."""
    text = "\n".join([tables.measured_steps(models), *(tables.measured_kernels(model) for model in models)])
    print(text)
    return text


def _gpu() -> Api:
    """The machine's GPU; ends the program where it has none."""
    reasons: list[str] = []
    for backend in ("cuda", "hip"):
        try:
            return find_api(backend)
        except Unavailable as error:
            reasons.append(str(error))
    sys.exit(
        f"benchmarks/gpu.py needs an NVIDIA or AMD GPU with its driver ({'; '.join(reasons)}); --dry-run and "
        "--tables need none."
    )


def _target(api: Api) -> str:
    found = [device.target for device in DEVICES if device.arch == api.arch]
    if not found:
        known = ", ".join(device.arch for device in DEVICES if not device.interpreted)
        sys.exit(f"benchmarks/gpu.py measures {known}; this GPU, {api.name}, is {api.arch}.")
    return found[0]


def _torch(repeats: int) -> Any:
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            f"torch {torch.__version__} cannot use this GPU: install a build for it, or give --no-torch."
        )
    from gpubench.torch_side import Torch

    return Torch("cuda", repeats)


if __name__ == "__main__":
    try:
        typer.run(command)
    except (CompileError, OctavoError) as error:
        sys.exit(f"error: {error}")
