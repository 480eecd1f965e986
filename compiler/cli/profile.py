"""`octavo profile`: where a step's time goes, beside what the machine allows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import runtime
from compiler.cli import values
from compiler.cli.options import EnginePath
from compiler.errors import CompileError
from runtime import machine

if TYPE_CHECKING:
    from rich.console import Console

    from compiler.profile.figures import StepFigures
    from compiler.profile.limits import Limits

HEADINGS = ("time\nms", "idle\n", "weights\nMB", "KV\nMB", "moved\nMB", "GFLOP\n", "of its\nbound")
WIDTH = 120  # where the output is no terminal


def command(
    engine: EnginePath,
    prompt_tokens: Annotated[int, typer.Option(help="Prompt tokens of each request.", min=1)] = 512,
    context_tokens: Annotated[int, typer.Option(help="Cached tokens before the prompt.", min=0)] = 0,
    requests: Annotated[int, typer.Option(help="Requests at once.", min=1, max=2**20)] = 1,
    threads: Annotated[
        int | None, typer.Option(help="Default: the cores this process may use.", min=1)
    ] = None,
    isa: Annotated[
        str | None,
        typer.Option(help="A kernel's level instead of the best that fits.", autocompletion=values.levels),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Figures are medians over this many runs.", min=1)] = 7,
    kernels: Annotated[bool, typer.Option("--kernels", help="List every kernel, in order.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Chrome trace (chrome://tracing, Perfetto).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Time every kernel of a prefill step and a decode step, beside the machine's bandwidth and peak.

    Of the target cpu. What a GPU's kernels ask of it, `octavo inspect --kernels` shows.

    octavo profile model.octavo

    octavo profile model.octavo --context-tokens 4096 --requests 16 --trace trace.json
    """
    from compiler.inspect.files import check_place, write_whole
    from compiler.inspect.tables import console
    from compiler.profile.run import profile
    from compiler.profile.steps import Workload
    from compiler.profile.trace import chrome_trace

    artifact = runtime.Artifact.open(engine)
    if "cpu" not in artifact.manifest.targets:
        raise CompileError(
            f"compiled for {', '.join(artifact.manifest.targets)}; octavo profile times the target cpu alone",
            where=str(engine),
            todo="Try octavo inspect --kernels, which shows a GPU's kernels beside their bounds",
        )
    if trace is not None:
        check_place(trace)
    num_threads = threads or machine.default_threads()
    workload = Workload(prompt_tokens, context_tokens, requests)
    found = profile(artifact, workload, num_threads, isa, repeats)
    if trace is not None:
        write_whole(trace, json.dumps(chrome_trace(found.steps)))
    about = {"isa": artifact.kernel(isa).isa, "threads": num_threads, "repeats": repeats}
    if as_json:
        steps = {name: step.as_json() for name, step in found.steps.items()}
        print(json.dumps({**about, "limits": vars(found.limits), **steps}))
        return
    shown = console(WIDTH)
    print(f"{about['isa']}, {num_threads} threads; {_describe(found.limits)}")
    for name, step in found.steps.items():
        _show(shown, name, step, kernels)


def _describe(limits: Limits) -> str:
    """The machine's limits, in one line."""
    bf16 = f", bf16 dot products {limits.bf16_ops_per_s / 1e9:.0f}" if limits.bf16_ops_per_s else ""
    f32 = f"f32 multiply-add {limits.f32_ops_per_s / 1e9:.0f}{bf16} GFLOP/s"
    codes = f"int8 {limits.i8_ops_per_s / 1e9:.0f}, int4 by int8 {limits.u4_ops_per_s / 1e9:.0f} GOP/s"
    return f"plain read {limits.read_bytes_per_s / 1e9:.1f} GB/s, {f32}, {codes}"


def _show(console: Console, name: str, step: StepFigures, every: bool) -> None:
    from rich.table import Table

    facts = step.as_json()
    print(
        f"\n{name}: {facts['tokens']} tokens of {facts['requests']} requests, each after "
        f"{facts['cached_tokens']}\n{step.time_s * 1e3:.2f} ms: {step.bandwidth_share:.0%} of the bandwidth "
        f"bound, {step.peak_share:.0%} of the arithmetic bound"
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nkernel", no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    if every:
        table.add_column("\nplace in the model", no_wrap=True)
        for kernel in facts["kernels"]:
            table.add_row(f"{kernel['number']} {kernel['label']}", *_cells(kernel), kernel["loc"])
    else:
        for group in facts["groups"]:
            table.add_row(f"{group['label']} x {group['kernels']}", *_cells(group))
    table.add_section()
    table.add_row("in all", *_cells({**facts, "time_s": sum(k["time_s"] for k in facts["kernels"])}))
    console.print(table, markup=False, highlight=False)


def _cells(facts: dict[str, Any]) -> Sequence[str]:
    scaled = [facts[f"{what}_bytes"] / 1e6 for what in ("weight", "kv", "activation")]
    return (
        f"{facts['time_s'] * 1e3:.3f}",
        f"{facts['idle_s'] / facts['time_s']:.0%}",
        *(f"{value:.2f}" for value in (*scaled, facts["operations"] / 1e9)),
        f"{facts['share']:.0%} {facts['bound']}",
    )
